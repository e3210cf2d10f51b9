"""Samples that share a row see each other as little as if each had been alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("transformers", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from training.models.names import load_recipe  # noqa: E402
from training.node import attention  # noqa: E402
from training.node.attention import SEGMENTS, Segments, segment_attention  # noqa: E402
from training.node.mixers import keep_apart  # noqa: E402
from training.node.model import trainable  # noqa: E402
from training.recipe.model_types import mixing  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402

pytestmark = pytest.mark.torch

LENGTHS = (5, 17, 1, 9)
PADDED = {"batching": "padded"}


def _model(kind, **changes):
    import transformers

    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**shape, **heads, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=SEGMENTS)
    model.config.use_cache = False
    return model


def _row():
    torch.manual_seed(1)
    ids = torch.randint(128, (1, sum(LENGTHS)))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
def test_packed_and_separate_samples_have_the_same_logits_and_gradients(kind, checkpointing):
    model = _model(kind).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, positions = _row()
    pull = torch.randn(1, sum(LENGTHS), 128)
    packed = model(input_ids=ids, position_ids=positions, segments=Segments.of(positions)).logits
    (packed * pull).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("sdpa")
    alone = torch.cat([model(input_ids=part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    (alone * pull).sum().backward()
    assert (packed - alone).abs().max() < 1e-5
    for name, p in model.named_parameters():
        assert (gradients[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name


def _tiny(model_type, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **shape, **heads, **{"sliding_window": WINDOW, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=SEGMENTS).eval()
    for p in model.parameters():  # not as made: ones and zeros would hide a layer that mixes
        p.data += 0.2 * torch.randn_like(p)
    return model


WINDOW = 8


def _plainly(query, key, value, *, scaling, window, softcap, sinks):
    """Each sample by its definition, query by query."""
    groups = query.shape[1] // key.shape[1]
    key, value, outs, first = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), [], 0
    for length in LENGTHS:
        for last in range(first, first + length):
            since = first if window is None else max(first, last - window + 1)
            scores = (key[:, :, since : last + 1] @ query[:, :, last, :, None])[..., 0] * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            bottom = 0.0 if sinks is None else sinks.exp()[None, :, None]
            weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + bottom)
            outs.append((weights[..., None] * value[:, :, since : last + 1]).sum(2))
        first += length
    return torch.stack(outs, 1)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, WINDOW, 2])
def test_windows_caps_and_sinks_are_computed_within_each_sample_with_their_gradients(window, softcap, sinks):
    torch.manual_seed(2)
    shapes = [(1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 6), (4,)]
    q, k, v, s = given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    asked = {"sliding_window": window, "softcap": softcap, "s_aux": s if sinks else None}
    segments = Segments.of(_row()[1])
    ours, _ = segment_attention(None, q, k, v, None, segments=segments, scaling=0.5, **asked)
    right = _plainly(q, k, v, scaling=0.5, window=window, softcap=softcap, sinks=s if sinks else None)
    pull = torch.randn_like(right)
    mine, wanted = (
        torch.autograd.grad(out, given if sinks else given[:3], pull, retain_graph=True) for out in (ours, right)
    )
    assert (ours - right).abs().max() < 1e-6 * right.abs().max()
    for got, want in zip(mine, wanted, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def _leak(model):
    """How far the logits of a packed row are from those of its samples alone."""
    ids, positions = _row()
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, segments=Segments.of(positions), use_cache=False).logits
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    return (packed - alone).abs().max() / alone.abs().max()


@pytest.mark.parametrize("window", [None, 4])
def test_scores_that_no_kernel_computes_are_made_some_at_a_time_and_not_kept(window, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 32, 8, requires_grad=True) for heads in (4, 2, 2))
    scores = attention.Scores(8**-0.5, window, 5.0, torch.randn(4, requires_grad=True))
    given = (q, k, v, scores.sinks)

    def learned():
        out = attention._by_softmax(q, k, v, scores)
        return out, torch.autograd.grad(out.sin().sum(), given)

    whole, gradients = learned()
    monkeypatch.setattr(attention, "MOST_SCORES", 4 * 32 * 5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        parts, of_parts = learned()
    assert (parts - whole).abs().max() < 1e-6
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(of_parts, gradients, strict=True))
    assert kept and max(kept) <= q.numel() < 4 * 32 * 32


@pytest.mark.parametrize(("width", "value_width", "takes"), [(128, 128, True), (256, 256, True), (512, 512, False)])
def test_the_kernel_is_given_no_wider_heads_than_it_takes(width, value_width, takes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    on_gpu = {"is_cuda": True, "dtype": torch.bfloat16, "device": "cuda"}
    query, value = (SimpleNamespace(**on_gpu, shape=(1, 8, 32, each)) for each in (width, value_width))
    assert attention._one_kernel_takes(query, value) is takes


@pytest.mark.parametrize(
    ("told", "kv_heads", "gets"), [(False, 2, {}), (True, 2, {"enable_gqa": True}), (True, 4, {"enable_gqa": False})]
)
def test_the_kernel_is_told_of_grouped_heads_where_this_torch_has_the_argument(told, kv_heads, gets, monkeypatch):
    seen = []

    def of_2_11(q, *_, window_size, scale):
        return q

    def of_2_13(q, *_, window_size, scale, enable_gqa):
        seen.append(enable_gqa)
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_13 if told else of_2_11)
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, kv_heads, 6, 8)
    out = attention._in_one_kernel(query, key, key, Segments.of(torch.arange(6)[None]), attention.Scores(scale=1.0))
    assert out.shape == (1, 6, 4, 8) and seen == list(gets.values())


def test_a_model_with_convolutions_leaks_unless_each_is_called_once_a_sample():
    model = _tiny("lfm2", layer_types=["conv", "full_attention"])
    assert _leak(model) > 1e-3
    model.set_attn_implementation(SEGMENTS)
    keep_apart(model)
    keep_apart(model)
    assert _leak(model) < 1e-5


def test_a_type_that_was_never_proved_shares_no_rows():
    model = _tiny("stablelm")
    for batching in ("packed", "padding-free"):
        with pytest.raises(RecipeError, match=r"samples of a 'stablelm' apart .*; take batching = padded"):
            trainable(model, load_recipe("tiny", {"batching": batching}), Path("StableLM"))
    assert mixing("stablelm", load_recipe("tiny", {"batching": "padded"})) == ""


def test_what_would_change_attention_is_refused_and_what_would_not_is_let_through():
    _, positions = _row()
    segments = Segments.of(positions)
    q = torch.randn(1, 4, sum(LENGTHS), 8)
    with pytest.raises(ValueError, match="without score_bias"):
        segment_attention(None, q, q, q, None, segments=segments, score_bias=torch.zeros(4))
    with pytest.raises(ValueError, match="without a view ahead"):
        segment_attention(None, q, q, q, None, segments=segments, is_causal=False)
    segment_attention(None, q, q, q, None, segments=segments, softcap=None, position_ids=positions, is_causal=True)


def test_what_one_sample_says_never_reaches_the_next():
    model = _model("Qwen2")
    ids, positions = _row()
    segments = Segments.of(positions)
    before = model(input_ids=ids, position_ids=positions, segments=segments).logits
    ids[0, : LENGTHS[0]] = (ids[0, : LENGTHS[0]] + 1) % 128
    after = model(input_ids=ids, position_ids=positions, segments=segments).logits
    assert torch.equal(before[:, LENGTHS[0] :], after[:, LENGTHS[0] :])
    assert not torch.allclose(before[:, : LENGTHS[0]], after[:, : LENGTHS[0]])


def test_the_cost_is_the_sum_of_squares_and_no_mask_is_made():
    """4,096 tokens in samples of 16: a mask or a score matrix of the whole row would have 16.8 million elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, torch.Tensor)]
            self.seen = max(self.seen, *sizes, 0)
            return out

    model = _model("Qwen2").model
    positions = torch.arange(16).repeat(256)[None]
    with Largest() as largest, torch.no_grad():
        model(input_ids=positions, position_ids=positions, segments=Segments.of(positions), use_cache=False)
    assert largest.seen <= 4096 * 96 * 2


def test_segments_are_counted_from_positions_that_start_again():
    _, positions = _row()
    segments = Segments.of(positions)
    assert segments.lengths == LENGTHS
    assert segments.bounds.tolist() == [0, 5, 22, 23, 32] and segments.bounds.dtype == torch.int32


def test_a_mask_beside_segments_is_refused():
    _, positions = _row()
    segments = Segments.of(positions)
    q = torch.randn(1, 4, sum(LENGTHS), 8)
    with pytest.raises(ValueError, match="a mask beside them"):
        segment_attention(None, q, q, q, torch.ones(1, 1), segments=segments)
    with pytest.raises(ValueError, match="share one row, found 2"):
        Segments.of(positions.repeat(2, 1))
