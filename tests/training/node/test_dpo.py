"""Goal dpo: log-probabilities without logits, and the loss of a pair, against plain torch."""

from __future__ import annotations

import json
import math
import shutil

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from training.data.collate import collate  # noqa: E402
from training.data.sample import IGNORED, Sample  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import dpo, head_check, model  # noqa: E402
from training.node.attention import Segments, segment_attention  # noqa: E402
from training.node.cross_entropy import Logits  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.recipe.tables import Dpo  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH, VOCABULARY = 32, 500
EXACT = {"goal": "dpo", "dtype": "float32", "lora.dropout": "0.0", "gradient_checkpointing": "false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write_model(path, steps=2)
    return path


def _sample(*, asked, said, seed):
    torch.manual_seed(seed)
    ids = torch.randint(3, 2000, (asked + said,)).tolist()
    return Sample(ids, [IGNORED] * asked + ids[asked:])


def _pairs():
    """Three pairs of far from equal lengths; a pair shares its prompt."""
    found = []
    for seed, (asked, chosen, rejected) in enumerate([(5, 9, 30), (3, 2, 2), (20, 14, 7)]):
        one, other = (_sample(asked=asked, said=said, seed=10 * seed + n) for n, said in enumerate((chosen, rejected)))
        found.append([one, Sample(one.ids[:asked] + other.ids[asked:], other.labels)])
    return found


def _loaded(folder, *, moved=True, **more):
    """A model as `dpo` trains it, its adapter moved away from nothing."""
    recipe = load_recipe("tiny", EXACT | more)
    loaded = model.load(recipe, folder)
    if moved:
        torch.manual_seed(1)
        for name, weight in loaded.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)
    return dpo.loss_model(loaded, recipe), loaded, recipe


def _plain(folder, loaded, recipe):
    """The same with transformers' own attention and head."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = model.trainable(base, recipe, folder)
    plain.load_state_dict(loaded.state_dict())
    return plain


def _log_prob(loaded, sample):
    """Of an answer, by transformers' own logits."""
    ids, wanted = torch.tensor(sample.ids), torch.tensor(sample.labels)[1:]
    logits = loaded(input_ids=ids[None]).logits[0, :-1]
    kept = wanted != IGNORED
    return logits[kept].log_softmax(1).gather(1, wanted[kept][:, None]).sum()


@pytest.mark.parametrize("made", [Logits(), Logits(0.5), Logits(cap=3.0)], ids=["plain", "scaled", "capped"])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities_and_their_gradients_are_those_of_whole_logits(made, bias):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
    hidden = (3 * torch.randn(1, 70, WIDTH)).requires_grad_()
    targets = torch.randint(VOCABULARY, (1, 70))
    targets[0, :20] = IGNORED
    kept = targets[0] != IGNORED
    factors = torch.randn(50)
    logits = made(head(hidden[0][kept]) + 0.0)
    wanted = logits.log_softmax(1).gather(1, targets[0][kept][:, None]).squeeze(1)
    (wanted * factors).sum().backward()
    right, hidden.grad = hidden.grad, None
    found = dpo.fuse(head, 16, made)(hidden, targets)
    (found * factors).sum().backward()
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(hidden.grad, right, atol=1e-6) and right.abs().max() > 0.1


def test_a_batch_without_pairs_gives_nothing_and_a_gradient_of_nothing(folder):
    of_pairs, loaded, _ = _loaded(folder)
    numbers = of_pairs(**model.inputs(collate([], 0, "packed", pairs=True), "cpu"))
    assert numbers.tolist() == [0.0] * 4
    numbers[0].backward()
    grads = [p.grad for p in loaded.parameters() if p.requires_grad]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_a_base_with_dropout_of_its_own_begins_at_the_logarithm_of_two(folder, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    of_pairs, _, _ = _loaded(base, moved=False)
    numbers = of_pairs.train()(**model.inputs(collate(_pairs(), 0, "packed", pairs=True), "cpu"))
    assert numbers[0].item() == pytest.approx(3 * math.log(2), abs=1e-6)


WAYS = {
    "sigmoid": (Dpo(), lambda m: -F.logsigmoid(0.1 * m)),
    "smoothed": (
        Dpo(beta=0.3, label_smoothing=0.2),
        lambda m: -0.8 * torch.log(torch.sigmoid(0.3 * m)) - 0.2 * torch.log(torch.sigmoid(-0.3 * m)),
    ),
    "length normalised": (Dpo(beta=2.0, length_normalised=True), lambda m: torch.log1p(torch.exp(-2.0 * m))),
    "ipo": (Dpo(beta=0.5, loss="ipo"), lambda m: (m - 1.0) ** 2),
    "ipo of sums": (Dpo(beta=0.5, loss="ipo", length_normalised=False), lambda m: (m - 1.0) ** 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_pairs_and_its_gradient_are_the_papers_formula_over_plain_logits(folder, way):
    table, loss = WAYS[way]
    settings = {f"dpo.{key}": json.dumps(value) for key, value in table if value is not None}
    of_pairs, loaded, recipe = _loaded(folder, **settings)
    plain, pairs = _plain(folder, loaded, recipe).double(), _pairs()
    numbers = of_pairs.double()(**model.inputs(collate(pairs, 0, "packed", pairs=True), "cpu"))
    numbers[0].backward()

    given = [sample for pair in pairs for sample in pair]
    with torch.no_grad(), plain.disable_adapter():
        references = torch.stack([_log_prob(plain, sample) for sample in given])
    plain.requires_grad_(False)
    for name, weight in plain.named_parameters():
        weight.requires_grad_("lora_" in name)
    ratios = torch.stack([_log_prob(plain, sample) for sample in given]) - references
    # fp32 rounds a log-probability 3 times (logit, normaliser, difference), and a sum of 30 of them log2(30) = 5 times:
    # 8 times half an epsilon of the sum. A ratio is the difference of two sums.
    apart = 4 * torch.finfo(torch.float32).eps * (references + (references + ratios).detach()).abs()
    rewards, rewards_apart = table.beta * ratios.detach(), table.beta * apart
    if table.by_token:
        learned = torch.tensor([sample.learned for sample in given])
        ratios, apart = ratios / learned, apart / learned
    margins = ratios[::2] - ratios[1::2]
    total = loss(margins).sum()
    (slopes,) = torch.autograd.grad(total, margins, retain_graph=True)
    total.backward()
    assert abs(margins[0]) > 1e-3, "the adapter says something else than its base"
    bound = (slopes.abs() * (apart[::2] + apart[1::2])).sum().item()
    assert numbers[0].item() == pytest.approx(total.item(), rel=0, abs=bound)
    assert numbers[1].item() == (rewards[::2] > rewards[1::2]).sum().item()
    for number, half in zip(numbers[2:].tolist(), (slice(0, None, 2), slice(1, None, 2)), strict=True):
        assert number == pytest.approx(rewards[half].sum().item(), rel=0, abs=rewards_apart[half].sum().item())
    theirs = model.trainable_parameters(plain)
    for name, weight in model.trainable_parameters(loaded).items():
        right = theirs[name].grad
        assert (weight.grad - right).norm() < 1e-4 * right.norm(), name


@pytest.mark.parametrize("batching", ["padded", "padding-free"])
@pytest.mark.parametrize("head", ["frozen", "with a lora"])
def test_pairs_packed_together_are_as_each_pair_alone(folder, batching, head):
    settings = {"lora.targets": '["q_proj", "lm_head"]'} if head == "with a lora" else {}
    packed, loaded, _ = _loaded(folder, **settings)
    apart, other, _ = _loaded(folder, batching=batching, **settings)
    pairs = _pairs()
    together = packed(**model.inputs(collate([pairs[0] + pairs[1], pairs[2]], 0, "packed", pairs=True), "cpu"))
    together[0].backward()
    alone = [apart(**model.inputs(collate([pair], 0, batching, pairs=True), "cpu")) for pair in pairs]
    sum(numbers[0] for numbers in alone).backward()
    assert together.tolist() == pytest.approx(sum(alone).tolist(), rel=1e-4, abs=1e-6)
    theirs = model.trainable_parameters(other)
    for name, weight in model.trainable_parameters(loaded).items():
        assert (weight.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name


@pytest.mark.parametrize("kind", [{}, {"sliding_window": 4}, {"softcap": 2.0}], ids=["plain", "window", "cap"])
def test_attention_with_a_beginning_in_common_is_that_of_each_sample_whole(kind):
    torch.manual_seed(0)
    layout = ((5, 9, 12), (0, 3, 2), (4, 6, 5))
    length = sum(first + second - shared for shared, first, second in layout)
    row = [torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]
    found, _ = segment_attention(None, *row, None, segments=Segments.of_pairs(layout), **kind)
    found.square().sum().backward()
    grads = [each.grad for each in row]
    whole = [each.detach().requires_grad_() for each in row]
    parts, start = [], 0
    for shared, first, second in layout:
        middle, end = start + first, start + first + second - shared
        chosen = [each[:, :, start:middle] for each in whole]
        rejected = [torch.cat((each[:, :, start : start + shared], each[:, :, middle:end]), 2) for each in whole]
        for sample, from_place in ((chosen, 0), (rejected, shared)):
            alone = Segments.of(torch.arange(sample[0].shape[2])[None])
            parts.append(segment_attention(None, *sample, None, segments=alone, **kind)[0][:, from_place:])
        start = end
    right = torch.cat(parts, 1)
    right.square().sum().backward()
    assert torch.allclose(found, right, atol=1e-6)
    assert all(torch.allclose(grad, each.grad, atol=1e-5) for grad, each in zip(grads, whole, strict=True))


def test_a_model_that_cannot_share_a_beginning_is_found_before_a_run(folder, monkeypatch):
    head_check.difference.cache_clear()
    assert max(head_check.difference(folder, kind, pairs=True).worst for kind in ("packed", "padded")) < 1e-5
    head_check.difference.cache_clear()
    monkeypatch.setattr(Segments, "of_pairs", lambda layout, device: Segments.of(_restarting(layout), device))
    with pytest.raises(RecipeError, match="our loss is not that of a 'qwen2'"):
        head_check.check_loss_matches_model(load_recipe("tiny", EXACT), folder)
    head_check.difference.cache_clear()


def _restarting(layout):
    """Positions of a row whose answers behind the first are taken for samples of their own."""
    parts = [torch.arange(n) for shared, first, second in layout for n in (first, second - shared)]
    return torch.cat(parts)[None]


def test_the_first_loss_is_the_logarithm_of_two_for_nothing_has_been_learned(folder):
    of_pairs, _, _ = _loaded(folder, moved=False)
    numbers = of_pairs(**model.inputs(collate(_pairs(), 0, "packed", pairs=True), "cpu"))
    assert numbers[0].item() == pytest.approx(3 * torch.log(torch.tensor(2.0)).item(), rel=1e-6)
    assert numbers[1:].tolist() == [0.0, 0.0, 0.0]


def test_beside_four_bits_a_weight_the_reference_is_the_base_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the [train] extra")
    from training.node import nf4

    path = tmp_path / "models" / "tiny"
    path.parent.mkdir()
    tiny.write_model(path, steps=1)
    nf4.make_here(path, torch.float32)
    of_pairs, loaded, _ = _loaded(path, moved=False, base_precision="nf4", strategy="zero0")
    batch = model.inputs(collate(_pairs(), 0, "packed", pairs=True), "cpu")
    assert of_pairs(**batch)[0].item() == pytest.approx(3 * torch.log(torch.tensor(2.0)).item(), rel=1e-6)
    for name, weight in loaded.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.2)
    moved = of_pairs(**batch)
    moved[0].backward()
    assert moved[2].item() != 0
    assert all(weight.grad is not None for weight in loaded.parameters() if weight.requires_grad)
