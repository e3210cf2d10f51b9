"""What ranks do on CUDA cards, on imitated ones (tests/support/fake_cuda/loader.py says what those cannot show): where
tensors lie, which collectives run, what is allocated, how a full card ends a run."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import forked_rank, tiny_adapter  # noqa: E402
from tests.support.ranks import together  # noqa: E402
from tests.support.selection import selected  # noqa: E402
from training.cost.memory import GIB  # noqa: E402
from training.cost.strategies import STRATEGIES  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.node.prove import curve  # noqa: E402
from training.node.supervision.failure import Observation, verdict  # noqa: E402
from training.run import comm_report  # noqa: E402
from training.run.causes import Cause  # noqa: E402
from training.run.events import Ended, line_of  # noqa: E402
from training.run.launch import Host, Launch  # noqa: E402
from training.text.problems import FAILED  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.fake_cuda]

NODE, SUPPORT = Path(__file__).parents[3] / "training" / "node", Path(__file__).parents[2] / "support"
CARDS = SUPPORT / "fake_cuda"
EXACT = {
    "dtype": "float32",
    "global_batch": "4",
    "micro_batch": "1",
    "lora.dropout": "0",
    "lora.rank": "4",
    "max_length": "96",
    "loss_chunk": "64",
    "optimizer.warmup_steps": "0",
}
DPO, HALF, NF4 = {"goal": "dpo"}, {"dtype": "bfloat16"}, {"base_precision": "nf4"}
OFF = {"offload.optimizer": "true"}
PIPELINE = {"strategy": "pipeline", "pipeline.stages": "2"}
EXPERTS = {"lora.experts": "true", "lora.experts_rank": "2"}
ALIKE = {
    "plain": [{"strategy": "zero0"}, {"strategy": "zero1"}, {"strategy": "zero3"}, PIPELINE],
    "offloaded": [{"strategy": "zero2"} | OFF, {"strategy": "zero3", "offload.parameters": "true"} | OFF],
    "in other batches": [{"strategy": "zero0", "batching": "padded", "micro_batch": "2"}],
    "pairs": [{"strategy": "zero2"} | DPO, {"strategy": "zero3"} | DPO, PIPELINE | DPO],
    "in four bits": [{"strategy": "zero0"} | NF4, {"strategy": "zero2"} | NF4, PIPELINE | NF4],
    "bf16": [{"strategy": "zero0"} | HALF, {"strategy": "zero2"} | HALF, {"strategy": "zero3"} | HALF, PIPELINE | HALF],
    "whole": [{"strategy": f"zero{stage}", "tuning": "full"} for stage in (0, 2, 3)],
    "experts": [{"strategy": "zero0"} | EXPERTS, {"strategy": "zero3"} | EXPERTS, PIPELINE | EXPERTS],
    "experts in four bits": [{"strategy": "zero0"} | NF4, {"strategy": "zero2"} | NF4],
}
"""Recipes that learn the same, on two ranks."""
SAME_AS = {"offloaded": "plain", "in other batches": "plain"}
FAR_APART = {"bf16": 2e-2}
RUN = {
    "steps": "2",
    "global_batch": "4",
    "micro_batch": "1",
    "max_length": "96",
    "save_every": "2",
    "logging.tensorboard": "false",
    "lora.rank": "4",
    "validation.fraction": "0.2",
    "validation.every": "2",
}
RUNS = {
    "zero3": {"strategy": "zero3", "lora.dropout": "0.1"},
    "pairs": {"strategy": "zero2"} | DPO,
    "four bits": {"strategy": "zero0"} | NF4,
    "pipeline": PIPELINE,
}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    tiny_adapter.write_base(folder / "models" / "tiny", layers=3)
    (folder / "curve").mkdir()
    curve.write_model(folder / "curve")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    tiny_adapter.write_of_type(folder / "models" / "tiny", folder / "models" / "qwen3_moe", "qwen3_moe", **experts)
    return folder


def _named(kind, recipe):
    stage = recipe.get("pipeline.stages", "")
    return f"{kind} {recipe['strategy']} {stage}".strip()


def _cases(house, kinds):
    model = {kind: {"model": str(house / "models" / "qwen3_moe")} for kind in kinds if "experts" in kind}
    return [
        {"name": _named(kind, recipe), "steps": 2, "recipe": recipe} | model.get(kind, {})
        for kind in kinds
        for recipe in ALIKE[kind]
    ]


@pytest.fixture(scope="module")
def on_two(request, house):
    began = time.monotonic()
    curves = [
        {"name": f"{name} {again}", "curve of": name, "again": again, "model": str(house / "curve")}
        for name in STRATEGIES
        for again in selected(request, "again")
    ]
    found = _on_cards(house, 2, [*curves, *_cases(house, ALIKE)])
    print(f"two ranks: {len(found)} cases in {time.monotonic() - began:.0f} s")
    return found


def _on_cards(house, ranks, cases, name="cards-", **card):
    start, model = partial(forked_rank.start_on_cards, **card), str(house / "models" / "tiny")
    return together(house, ranks, EXACT, cases, name, start=start, model=model)


@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.proof)], ids=["checkpointing", "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_walks_the_stored_curve(on_two, strategy, again):
    assert on_two[f"{strategy} {again}"] < curve.TOLERANCE["cpu"]


@pytest.mark.parametrize("kind", ALIKE)
def test_what_learns_the_same_gives_the_same_losses_however_it_is_spread(on_two, kind):
    first = on_two[_named(SAME_AS.get(kind, kind), ALIKE[SAME_AS.get(kind, kind)][0])]
    assert min(first["norms"]) > 0
    for recipe in ALIKE[kind]:
        found = on_two[_named(kind, recipe)]
        assert found["losses"] == pytest.approx(first["losses"], rel=FAR_APART.get(kind, 1e-4)), recipe
        assert found["held_out"] == pytest.approx(first["held_out"], rel=FAR_APART.get(kind, 1e-3)), recipe


def test_strategies_pass_where_no_kernel_of_the_loss_can_be_compiled(tmp_path):
    """As a run trains there; that it cannot be is a row of its own."""
    (tmp_path / "asked.json").write_text('{"quick": true}')
    started = forked_rank.start_on_cards(2, SUPPORT / "strategies_walk.py", "--run", tmp_path)
    codes, outputs = forked_rank.finish(started, 100)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    found = json.loads((tmp_path / "result.json").read_text())
    rows = {row["name"]: row["state"] for row in found["outcomes"]}
    assert rows == {"kernels of the loss": "fail", "zero2 with checkpointing": "pass"} and found["done"]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.proof)])
def test_three_and_four_cards_learn_what_two_do(house, on_two, ranks):
    staged = {"strategy": "pipeline", "pipeline.stages": "2" if ranks == 4 else "3"}
    each = [{"strategy": "zero0"}, {"strategy": "zero2"}, {"strategy": "zero3"}, staged]
    cases = [{"name": str(recipe), "steps": 2, "recipe": recipe} for recipe in each]
    found = _on_cards(house, ranks, cases)
    for name, its in found.items():
        assert its["losses"] == pytest.approx(on_two["plain zero0"]["losses"], rel=1e-4), name


def test_cards_without_bf16_learn_in_fp16_under_every_strategy(house, on_two):
    half = {"dtype": "float16", "strategy": "zero0"}
    each = [half, half | {"strategy": "zero2"}, half | {"strategy": "zero3"}, half | PIPELINE]
    cases = [{"name": str(recipe), "steps": 2, "recipe": recipe} for recipe in each]
    found = _on_cards(house, 2, cases, "t4-", FAKE_CUDA_CARD="T4")
    for name, its in found.items():
        assert its["losses"] == pytest.approx(on_two["plain zero0"]["losses"], rel=2e-2), name


def _run(house, name, recipe, records=None):
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    records = records or (tiny.preferences() if "goal" in recipe else tiny.questions())[:24]
    (run / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "recipe.toml").write_text(load_recipe("tiny", RUN | recipe).to_toml())
    prepare(run, skip_bad=False)
    return run


@pytest.fixture(scope="module")
def runs(house):
    """Whole runs on two ranks, one after another in the same processes; the last through main."""
    made = {name: _run(house, name, recipe) for name, recipe in RUNS.items()}
    (house / "jobs.json").write_text(json.dumps([{"run": str(run)} for run in made.values()]))
    started = forked_rank.start_on_cards(2, SUPPORT / "finetune_probe.py", house / "jobs.json")
    codes, outputs = forked_rank.finish(started, 300)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_learns_saves_and_tells_what_its_card_held(runs, name):
    rows = [json.loads(line) for line in (runs[name] / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2] and any("validation_loss" in row for row in rows)
    assert all(0 < row["memory_gib"] < 1 for row in steps), "of the card, not of the process"
    adapter = runs[name] / "checkpoints" / "step-2" / "adapter"
    assert (adapter / "adapter_model.safetensors").stat().st_size > 1000


def _programs(*commands):
    """Each a process with a card of its own, all at once."""
    started = [forked_rank.start_on_cards(1, NODE / "adapter" / name, *argv)[0] for name, *argv in commands]
    codes, outputs = forked_rank.finish(started, 200)
    assert codes == [0] * len(commands), "\n".join(text[-3000:] for text in outputs)
    return outputs


def test_answers_measures_and_merged_weights_come_of_a_card(house, runs):
    base, adapter = house / "models" / "tiny", runs["zero3"] / "checkpoints" / "step-2" / "adapter"
    held_out, out, merged = house / "held-out.jsonl", house / "evaluation.json", house / "merged"
    held_out.write_text("".join(json.dumps(record) + "\n" for record in tiny.questions()[30:33]))
    asked = ("--model", base, "--adapter", adapter)
    short = ("--max-new-tokens", "4")
    said, _, _ = _programs(
        ("generate.py", *asked, "--prompt", "What is two and two?", "--json", *short),
        ("evaluate.py", *asked, "--data", held_out, "--answers", "1", "--out", out, *short),
        ("merge.py", *asked, "--to", merged),
    )
    (answer,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert {"base", "tuned"} <= answer.keys()
    found = json.loads(out.read_text())
    assert 0 < found["tuned"]["loss"] != found["base"]["loss"] > 0
    (again,) = _programs(("generate.py", "--model", merged, "--prompt", "What is two and two?", "--json", *short))
    assert '"base"' in again and (merged / "config.json").is_file()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_check_of_the_network_is_right_and_each_rank_is_bound_to_its_card(tmp_path, ranks):
    started = forked_rank.start_on_cards(ranks, CARDS / "check_probe.py", "--run", tmp_path)
    codes, outputs = forked_rank.finish(started, 200)
    assert codes == [0] * ranks, "\n".join(text[-3000:] for text in outputs)
    result = comm_report.parse_result((tmp_path / "result.json").read_text())
    assert result["backend"] == "nccl" and not comm_report.wrong_results(result)
    for rank, said in enumerate(outputs):
        assert f"given on {{'cuda'}}, bound to [device(type='cuda', index={rank})]" in said
        assert "'attention in packed rows': 'pass', 'our fused loss': 'pass'" in said


def test_a_full_card_ends_a_run_out_of_gpu_memory(house):
    run = _run(house, "full", {"strategy": "zero0", "validation.fraction": "0"})
    started = forked_rank.start_on_cards(1, NODE / "finetune.py", "--run", run, FAKE_CUDA_BYTES=str(2 << 20))
    (code,), (said,) = forked_rank.finish(started, 100)
    assert code == FAILED, said[-3000:]
    launch = Launch(run.name, str(run), (Host("te1", "10.0.0.1", 1),), "training.node.finetune", (), "python", {})
    seen = Observation(launch)
    for line in [*said.splitlines(), line_of(Ended(code))]:
        seen.take(f"[0] {line}")
    assert verdict(seen, False, 1).cause == Cause("out_of_gpu_memory", code=FAILED)
    assert "The imitated card has 2097152" in said


PEAKS = {
    "zero0": {"strategy": "zero0"},
    "zero0, nothing again": {"strategy": "zero0", "gradient_checkpointing": "false"},
    "zero1 fp32": {"strategy": "zero1", "dtype": "float32"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero2 whole": {"strategy": "zero2", "tuning": "full"},
    "in four bits": {"strategy": "zero0"} | NF4,
}
OFTEN = ("zero0", "zero3", "in four bits")
"""Three core-seconds each."""


@pytest.fixture(scope="module")
def peaks(request, tmp_path_factory):
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("peaks")
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 8000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).bfloat16()
    (folder / "models" / "small").mkdir(parents=True)
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "models" / "small" / "model.safetensors", {"format": "pt"})
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.to_json_file(folder / "models" / "small" / "config.json", use_diff=False)
    recipe = EXACT | HALF | {"global_batch": "1", "lora.rank": "16", "max_length": "1024", "loss_chunk": "256"}
    recipe |= {"batching": "padding-free"}
    job, recipes = folder / "peaks.json", {name: PEAKS[name] for name in selected(request, "peak")}
    job.write_text(
        json.dumps({"model": str(folder / "models" / "small"), "tokens": 1024, "recipe": recipe, "recipes": recipes})
    )
    codes, outputs = forked_rank.finish(forked_rank.start_on_cards(1, CARDS / "peak_probe.py", job), 300)
    assert codes == [0], outputs[0][-3000:]
    return json.loads(job.with_suffix(".out.json").read_text())


@pytest.mark.parametrize(
    "peak", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.proof) for name in PEAKS]
)
def test_a_card_holds_what_the_plan_foresees(peaks, peak):
    held, planned = peaks[peak]
    print(f"{peak}: {held / GIB * 1024:.1f} MiB, planned {planned / GIB * 1024:.1f}")
    assert 0.7 < held / planned < 1.1
