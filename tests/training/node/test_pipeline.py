"""Stages over ranks (tests/support/engine_probe.py) against one process: the same losses, gradients and states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import tiny_adapter  # noqa: E402
from tests.support.ranks import samples, together  # noqa: E402
from tests.support.selection import selected  # noqa: E402
from training.cost.pipeline import SPLITTABLE  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.prove import curve  # noqa: E402
from training.node.stages import Share, in_order  # noqa: E402
from training.node.strategies import crossing  # noqa: E402
from training.node.strategies.crossing import gone_back, passes  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402

pytestmark = pytest.mark.torch

EXACT = {
    "strategy": "pipeline",
    "dtype": "float32",
    "global_batch": "8",
    "micro_batch": "2",
    "batching": "padding-free",
    "lora.dropout": "0.0",
    "lora.rank": "4",
    "optimizer.warmup_steps": "2",
    "optimizer.grad_clip": "0",
    "optimizer.weight_decay": "5.0",  # of matrices, and not of DoRA's vectors
    "seed": "4",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Of those that have some."""
UNTIED = {"model": "untied"}
OTHER_TYPES = sorted(set(SPLITTABLE) - {"qwen2"})
KINDS = {
    "rows of any length": ({}, {}),
    "padded": ({"batching": "padded"}, {}),
    "packed": ({"batching": "packed"}, {}),
    "bf16": ({"dtype": "bfloat16"}, {}),
    "nothing checkpointed": ({"gradient_checkpointing": "false"}, {}),
    "three layers checkpointed": ({"gradient_checkpointing": "3"}, {}),
    "one micro-batch": ({"global_batch": "2"}, {}),
    "three micro-batches": ({"global_batch": "6"}, {}),
    "untied": ({}, UNTIED),
    "a lora in the last layer": ({"lora.targets": '["layers.3.mlp.up_proj"]'}, {}),
    "a lora in the second layer": ({"lora.targets": '["layers.1.mlp.up_proj"]'}, {}),
    "a lora in the first layer": ({"lora.targets": '["layers.0.self_attn.q_proj"]'}, {}),
    "a lora on the head": ({"lora.targets": '["q_proj", "lm_head"]', "loss_chunk": "16"}, {}),
    "dora": ({"lora.dora": "true", "lora.rslora": "true"}, {}),
    "the head trained whole": ({"lora.modules_to_save": '["lm_head"]'}, UNTIED),
    "rows of tokens": ({"lora.trainable_tokens": '["<|im_end|>"]'}, UNTIED),
    "looked at between steps": ({}, {"looks": True}),
    **{each: ({}, {"model": each}) for each in OTHER_TYPES},
    "fp16 that overflows": ({"dtype": "float16"}, {"loss_scale": 2.0**22, "steps": 3}),
}
"""Recipe and case; each to the bit what one process gives."""
WITHOUT_TYPE = [kind for kind in KINDS if kind not in OTHER_TYPES]
ALL = {2: list(KINDS)[::3], 3: list(KINDS), 4: list(KINDS)[::4]}
"""Three have a first, a last and one between."""
KIND = "rows of any length"
"""What every number of ranks tries."""
OFTEN = {(ranks, KIND) for ranks in ALL} | {(3, kind) for kind in KINDS if kind not in ("mistral", "qwen3")}
LAID = [
    pytest.param((ranks, kind), marks=() if (ranks, kind) in OFTEN else pytest.mark.proof)
    for ranks in ALL
    for kind in ALL[ranks]
]
OF_STAGES = {
    2: {"layers": [[1, 3], [3, 1]], "held": [[4, 1], [3, 3], [1, 1]], "checkpointed": [[0, 1], [2, 0]]},
    3: {"layers": [[1, 1, 2]], "held": [[6, 5, 2], [3, 1, 1]], "checkpointed": [[1, 0, 1]]},
    4: {"layers": [], "held": [[9, 9, 2, 1]], "checkpointed": [[1, 0, 0, 1]]},
}
"""Of the recipe's table, by the number of ranks."""
LIES = [
    pytest.param((ranks, f"{key} {each}"), marks=pytest.mark.proof if ranks == 4 else ())
    for ranks, tables in OF_STAGES.items()
    for key in tables
    for each in tables[key]
]
SPREAD = {
    "zero0": {"strategy": "zero0"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "1": {"strategy": "pipeline"},
    "2": {"strategy": "pipeline"},
    "3": {"strategy": "pipeline"},
    "4": {"strategy": "pipeline"},
    "2 x 2": {"strategy": "pipeline", "pipeline.stages": "2"},
}
"""Numbers are those of stages."""
ON_FOUR = ["zero0", "zero2", "zero3", "4", "2 x 2"]
RESUMED = {
    4: [(before, after) for before in ON_FOUR for after in ("4", "2 x 2")],
    2: [
        *((before, "2") for before in [*ON_FOUR, "2"]),
        *(("2 x 2", after) for after in ON_FOUR[:3]),
    ],
    3: [*((before, "3") for before in ("zero2", "4", "2")), *(("2", after) for after in ON_FOUR[:3])],
    1: [*((before, "1") for before in ("zero3", "4", "2")), *(("4", after) for after in ON_FOUR[:3])],
}
"""From and to, by the ranks that go on; four ranks begin, then two, three, one. What replicas make of one another is
held in training/node/test_strategies.py."""
ONCE_EACH = {
    (4, "zero2", "2 x 2"),
    (4, "2 x 2", "4"),
    (2, "4", "2"),
    (2, "2 x 2", "zero0"),
    (3, "2", "3"),
    (1, "4", "1"),
}
GOES_ON = [
    pytest.param((ranks, *pair), marks=() if (ranks, *pair) in ONCE_EACH else pytest.mark.proof)
    for ranks, pairs in RESUMED.items()
    for pair in pairs
]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    tiny.write_model(folder / "tiny", steps=2)
    (folder / "curve").mkdir()
    curve.write_model(folder / "curve")
    tiny_adapter.write_variant(folder / "tiny", folder / "untied", tied=False)
    for each in OTHER_TYPES:
        tiny_adapter.write_of_type(folder / "tiny", folder / each, each, **EXPERTS)
    return folder


def _cases(house, kinds):
    made = []
    for kind in kinds:
        recipe, case = KINDS[kind]
        model = {"model": str(house / case["model"])} if "model" in case else {}
        made.append({"steps": 2, "state": True} | case | model | {"name": kind, "recipe": recipe})
    return made


def _tables(request, ranks):
    for number, table in selected(request, "lies"):
        if number == ranks:
            key, _, each = table.partition(" ")
            yield {"name": table, "steps": 2, "recipe": {f"pipeline.{key}": each}, "state": True}


def _resumes(request, house, ranks):
    """From a state after two steps to the fourth."""
    return [
        {
            "name": f"{before} -> {after}",
            "steps": 4,
            "first": 2,
            "recipe": SPREAD[after],
            "from": str(house / f"{before}.pt"),
        }
        for number, before, after in selected(request, "goes_on")
        if number == ranks
    ]


def _kept(request, house, ranks):
    """What others go on from."""
    names = dict.fromkeys(before for _, before, _ in selected(request, "goes_on"))
    return [
        {"name": f"kept {name}", "steps": 4, "recipe": SPREAD[name], "keep": str(house / f"{name}.pt"), "keep_at": 2}
        for name in {4: ON_FOUR, 2: ["2"]}.get(ranks, ())
        if name in names
    ]


def _on(request, house, ranks):
    """Kinds, what goes on there, what others go on from, and what is tried on every number of ranks."""
    laid = dict.fromkeys(kind for number, kind in selected(request, "laid") if number == ranks)
    cases = _cases(house, laid | {KIND: None}) + _kept(request, house, ranks) + _resumes(request, house, ranks)
    cases += _tables(request, ranks)
    clip = {"optimizer.grad_clip": "0.25"} | (SPREAD["2 x 2"] if ranks == 4 else {})
    cases.append({"name": "clipped", "steps": 3, "recipe": clip, "state": True})
    cases.append({"name": "bf16 sums", "steps": 3, "recipe": clip | {"gradient_sum": "bf16"}})
    cases.append({"name": "torch", "recipe": {}, "against torch": True})
    cases.append({"name": "curve", "curve of": "pipeline", "model": str(house / "curve")})
    return together(house, ranks, EXACT, cases)


@pytest.fixture(scope="module")
def on_ranks(request, house):
    """What four, two and three ranks gave; each resumes what those before it kept."""
    return {ranks: _on(request, house, ranks) for ranks in (4, 2, 3)}


@pytest.fixture(scope="module")
def alone(request, house, on_ranks):
    kinds = dict.fromkeys([*WITHOUT_TYPE, *(kind for _, kind in selected(request, "laid"))])
    cases = [{"name": "clipped", "steps": 3, "recipe": {"optimizer.grad_clip": "0.25"}, "state": True}]
    cases.append({"name": "undisturbed", "steps": 4, "recipe": {}})
    cases += _cases(house, kinds) + _resumes(request, house, 1)
    return together(house, 1, EXACT | {"strategy": "zero0"}, cases)


def _same(ours, theirs):
    assert ours["losses"] == theirs["losses"] and ours["correct"] == theirs["correct"]
    assert (ours["looks"], ours["skipped"], ours["held_out"]) == (
        theirs["looks"],
        theirs["skipped"],
        theirs["held_out"],
    )
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-12, nan_ok=True)
    assert ours["state"].keys() == theirs["state"].keys()
    differ = [key for key, value in theirs["state"].items() if not torch.equal(ours["state"][key], value)]
    assert not differ


@pytest.mark.parametrize("laid", LAID)
def test_stages_compute_to_the_bit_what_one_process_does(alone, on_ranks, laid):
    ranks, kind = laid
    _same(on_ranks[ranks][kind], alone[kind])


@pytest.mark.parametrize("lies", LIES)
def test_how_the_layers_lie_and_how_many_are_held_changes_no_bit(alone, on_ranks, lies):
    ranks, table = lies
    _same(on_ranks[ranks][table], alone[KIND])


def test_what_these_runs_try_did_happen(alone):
    assert set(alone["fp16 that overflows"]["skipped"]) == {True, False}
    assert len(set(alone["looked at between steps"]["looks"])) == 2
    assert alone[KIND]["losses"] != alone["untied"]["losses"]
    trained = {
        kind: {name.partition("/")[2] for name in alone[kind]["state"]} for kind in set(KINDS) - set(OTHER_TYPES)
    }
    assert all(".layers.3." in name for name in trained["a lora in the last layer"])
    assert all(".layers.1." in name for name in trained["a lora in the second layer"])
    parts = {"a lora on the head": "lm_head.lora_", "dora": "magnitude", "rows of tokens": "trainable_tokens"}
    for kind, part in parts.items():
        assert any(part in name for name in trained[kind]), kind


def test_a_gradient_is_clipped_by_the_norm_over_all_stages_and_two_replicas_share_the_rows(alone, on_ranks):
    """Two stages, three, and two replicas of two stages: the sums' order differs there."""
    wanted = alone["clipped"]
    assert min(wanted["norms"]) > 0.25, "clipping must take part"
    for ranks, found in on_ranks.items():
        ours = found["clipped"]
        for key in ("losses", "norms"):
            assert ours[key] == pytest.approx(wanted[key], rel=1e-6), ranks
            assert found["bf16 sums"][key] == pytest.approx(wanted[key], rel=1e-2), ranks
        assert (found["bf16 sums"]["norms"] == ours["norms"]) == (ranks != 4), "only replicas have sums"
        masters = {key: value for key, value in wanted["state"].items() if key.startswith("master/")}
        apart = [((ours["state"][key] - value).norm() / value.norm()).item() for key, value in masters.items()]
        assert max(apart) < 1e-4, ranks


@pytest.mark.parametrize("goes_on", GOES_ON)
def test_a_run_goes_on_from_every_way_to_spread_it_in_every_other(alone, on_ranks, goes_on):
    ranks, before, after = goes_on
    losses = (on_ranks | {1: alone})[ranks][f"{before} -> {after}"]["losses"]
    assert losses == pytest.approx(alone["undisturbed"]["losses"][2:], rel=1e-5)


@pytest.mark.parametrize("ranks", OF_STAGES)
def test_torchs_own_schedule_over_the_same_stages_gives_the_same_bits(on_ranks, ranks):
    seen = on_ranks[ranks]["torch"]
    assert [ours for ours, *_ in seen[:-1]] == [0.0] * (ranks - 1), "the last stage alone knows the loss"
    ours, theirs, *_ = seen[-1]
    assert ours == pytest.approx(theirs, rel=1e-6) and ours > 0
    for _, _, by_ours, by_torch in seen:
        assert by_ours.abs().max() > 0 and torch.equal(by_ours, by_torch)


@pytest.mark.parametrize("ranks", OF_STAGES)
def test_the_curve_that_proves_machines_is_walked_in_as_many_stages_as_the_ranks_allow(on_ranks, ranks):
    assert on_ranks[ranks]["curve"] < curve.TOLERANCE["cpu"]


def test_each_rank_reads_its_stage_alone_and_both_ends_a_tied_embedding(on_ranks):
    whole = on_ranks[2][KIND]["facts"]["parameters"]
    embedding = 2048 * 128
    for ranks, found in on_ranks.items():
        read = found[KIND]["elements_read"]
        assert sum(read) == whole + embedding, "the shared one twice"
        assert max(read) < 0.75 * whole, ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_optimizer_knows_its_stages_part_alone(on_ranks, ranks):
    share = on_ranks[ranks][KIND]["elements_optimized"]
    trained = on_ranks[ranks][KIND]["facts"]["trainable"]
    assert 0.2 * trained < share < 0.6 * trained


@pytest.mark.parametrize(("count", "held"), [(8, 4), (8, 1), (3, 4), (1, 3), (5, 9)])
def test_no_more_micro_batches_are_held_than_asked_and_each_goes_forward_and_back_once(count, held):
    done, most = {"forward": [], "backward": []}, 0
    for kind, number in passes(count, held):
        if kind == "forward":
            assert gone_back(number, held) == len(done["backward"]), "what the next stage goes by"
        done[kind].append(number)
        most = max(most, len(done["forward"]) - len(done["backward"]))
    assert done == {"forward": list(range(count)), "backward": list(range(count))}
    assert most == min(count, held)


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 1), ("cuda", 0)])
def test_a_receive_is_posted_ahead_on_cpus_alone(monkeypatch, device, ahead):
    """On a card it would run until the neighbour sends, and the loading of a kernel may wait for it."""
    posted = []
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(crossing.dist, "irecv", lambda tensor, *_: posted.append(tensor) or work)
    monkeypatch.setattr(crossing.torch, "empty", lambda shape, **_: shape)
    incoming = crossing.Incoming(0, None, [(1,), (2,)], torch.float32, torch.device(device))
    assert len(posted) == ahead
    assert incoming.take() == (1,) and len(posted) == 1 + ahead
    assert incoming.take() == (2,) and posted == [(1,), (2,)]


def test_layers_lie_in_order():
    assert in_order((2, 1)) == [Share(0, 2, range(2)), Share(1, 2, range(2, 3))]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tuning": "full"}, "trains adapters; tuning = full needs one of zero0 to zero3"),
        ({"offload.parameters": "true"}, "offload.parameters needs strategy zero3, not pipeline"),
        ({"pipeline.held": "[2, 3]"}, "pipeline.held"),
        ({"pipeline.stages": "3", "pipeline.layers": "[2, 2]"}, "pipeline.layers"),
    ],
)
def test_what_a_pipeline_cannot_be_is_refused_with_the_recipe(settings, reason):
    with pytest.raises(RecipeError, match=reason):
        load_recipe("tiny", {"strategy": "pipeline"} | settings)


@pytest.mark.parametrize(
    ("model", "ranks", "settings", "reason"),
    [
        ("tiny", 5, {}, "tiny: 5 stages for 4 layers: set pipeline.stages to 4 at most"),
        ("tiny", 3, {"pipeline.stages": "2"}, "tiny: 3 ranks are no multiple of 2 stages"),
        ("tiny", 2, {"pipeline.layers": "[1, 2]"}, "tiny: pipeline.layers adds up to 3, and the model has 4 layers"),
        ("tiny", 2, {"pipeline.held": "[3, 2, 1]"}, "pipeline.held has 3 numbers for 2 stages"),
        ("tiny", 2, {"lora.modules_to_save": '["lm_head"]'}, "lora.modules_to_save"),
        ("tiny", 2, {"lora.trainable_tokens": '["<|im_end|>"]'}, "lora.trainable_tokens"),
        ("other", 2, {}, "a gpt2 model cannot lie in stages; possible: llama, mistral, qwen2"),
    ],
)
def test_what_does_not_fit_model_or_ranks_is_refused(house, model, ranks, settings, reason):
    from transformers import AutoConfig, GPT2Config

    from training.node.strategies import stage

    config = GPT2Config() if model == "other" else AutoConfig.from_pretrained(house / model)
    with pytest.raises(RecipeError, match=reason):
        stage.refuse_misfit(load_recipe("tiny", EXACT | settings), house / model, config, ranks)


def test_of_twenty_samples_each_length_is_there():
    assert {len(ids) for ids, _ in samples()} == {5, 9, 17, 40, 80}
