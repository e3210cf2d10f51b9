"""Real runs of training.node.finetune: DeepSpeed ZeRO-3 on gloo ranks of this machine, held against plain torch.

Each run is made once and looked at by several tests. Every rank is started by its own copy of DeepSpeed's
launcher, as on machines of their own: three times in all its length, else both are forked (tests/support/programs.py).
"""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import programs, tiny_adapter  # noqa: E402
from tests.support.ports import free_pair  # noqa: E402
from tests.support.rank_output import outputs as said_by  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.order import Order  # noqa: E402
from training.data.prepared import open_prepared  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.checkpoint import read_state, read_tensors  # noqa: E402
from training.node.model import init_adapter  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.text.problems import PEER_LOST, STOPPED, WRONG_CHECKPOINT  # noqa: E402

pytestmark = pytest.mark.torch

AS_ON_A_NODE = str(Path(__file__).parents[3])
"""As PYTHONPATH: nothing is forked."""
EXACT = {
    "dtype": "float32",
    "steps": "4",
    "global_batch": "5",
    "micro_batch": "2",
    "max_length": "96",
    "save_every": "2",
    "logging.tensorboard": "false",
    "validation.fraction": "0.35",
    "validation.every": "3",
    "lora.dropout": "0.0",
    "optimizer.warmup_steps": "2",
    "optimizer.grad_clip": "0.125",
}
"""fp32 without dropout, so that every cut into ranks must agree; 5 samples leave empty places on some."""

DROPOUT = EXACT | {"dtype": "bfloat16", "lora.dropout": "0.2", "optimizer.grad_clip": "1.0"}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with models/tiny (barely trained) and runs/."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "models").mkdir()
    tiny_adapter.write_base(folder / "models" / "tiny")
    return folder


def _new_run(house, name, overrides):
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    records = tiny.questions()[:40]
    records[3]["messages"][1]["content"] *= 5  # lengths far from equal, so that a mean of means would show
    (run / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "recipe.toml").write_text(load_recipe("tiny", overrides).to_toml())
    prepare(run, skip_bad=False)
    return run


def _start(run, ranks, *extra, path=programs.PATH):
    """One launcher a rank, each believing it is on a node of its own. Both are forked, but for PYTHONPATH `path`."""
    port = free_pair()
    nodes = base64.urlsafe_b64encode(json.dumps({f"te{n + 1}": [0] for n in range(ranks)}).encode()).decode()
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started = []
    for rank in range(ranks):
        command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={nodes}"]
        command += [f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        command += ["--module", "--no_local_rank", "training.node.finetune", "--run", str(run), *extra]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=run, env=environment, start_new_session=True, **pipes))
    return started


def _finish(started, timeout_s=180):
    """Exit codes and everything printed, by rank; leaves no process behind."""
    try:
        outputs = said_by(started, timeout_s)
        return [process.returncode for process in started], outputs
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _train(run, ranks, *extra, path=programs.PATH):
    codes, outputs = _finish(_start(run, ranks, *extra, path=path))
    assert codes == [0] * ranks, "\n".join(outputs)
    return outputs


def _metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _of(key, run):
    return [line[key] for line in _metrics(run) if "loss" in line]


@pytest.fixture(scope="module")
def on_two(house):
    run = _new_run(house, "two", EXACT)
    _train(run, 2, path=AS_ON_A_NODE)
    return run


@pytest.fixture(scope="module")
def undisturbed(house):
    run = _new_run(house, "undisturbed", DROPOUT)
    _train(run, 2)
    return run


def _plain_torch(run, model_dir):
    """The same training in one process, a batch at a time: losses, gradient norms, the last LoRA weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    recipe = load_recipe("tiny", EXACT)
    data = open_prepared(run / "data" / "prepared" / "train")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    init_adapter(model, recipe.seed)
    weights = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), weight_decay=0.0)
    order = Order(data.rows, recipe.seed, recipe.global_batch)
    losses, norms = [], []
    for step in range(4):
        samples = [sample for row in order.step(step) for sample in data.row(row)]
        batch = collate([samples], pad_id=0, batching="padded")  # each sample in a row of its own
        # transformers' own loss: the mean over all labels that are not -100
        loss = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, shift_labels=batch.targets, labels=0
        ).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), recipe.optimizer.grad_clip).item())
        optimizer.param_groups[0]["lr"] = recipe.optimizer.lr_at(step, 4)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, weights


def test_two_ranks_train_exactly_as_plain_torch_does(house, on_two):
    losses, norms, weights = _plain_torch(on_two, house / "models" / "tiny")
    assert min(norms) > 0.125, "clipping must take part"
    assert _of("loss", on_two)[0] == pytest.approx(losses[0], rel=1e-6)
    assert _of("loss", on_two) == pytest.approx(losses, rel=1e-5)
    assert _of("grad_norm", on_two) == pytest.approx(norms, rel=1e-4)
    saved = read_tensors(on_two / "checkpoints" / "step-4")
    assert {f"master/{name}" for name in weights} == {key for key in saved if key.startswith("master/")}
    for name, weight in weights.items():  # by norm: Adam makes steps of the noise in gradients near 0
        gap = (saved[f"master/{name}"] - weight.detach()).norm() / weight.detach().norm()
        assert gap < 1e-3, name


def test_three_ranks_agree_with_two_to_a_millionth(house, on_two):
    run = _new_run(house, "three", EXACT)
    _train(run, 3)
    assert _of("loss", run)[0] == pytest.approx(_of("loss", on_two)[0], rel=1e-6)
    assert _of("loss", run) == pytest.approx(_of("loss", on_two), rel=1e-5)
    assert _of("grad_norm", run)[0] == pytest.approx(_of("grad_norm", on_two)[0], rel=1e-5)
    assert _of("tokens", run) == _of("tokens", on_two)


def test_a_run_of_two_ranks_goes_on_alone(house, on_two):
    run = house / "runs" / "alone"
    shutil.copytree(on_two, run)
    expected = _of("loss", on_two)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    output = _train(run, 1, "--resume", path=AS_ON_A_NODE)[0]
    assert "resumed from step-2, saved by 2 ranks" in output
    assert _of("step", run) == [1, 2, 3, 4]
    assert _of("loss", run) == pytest.approx(expected, rel=1e-5)
    assert read_state(run / "checkpoints" / "step-4").world_size == 1


def test_a_stopped_and_resumed_run_repeats_the_undisturbed_one_bit_for_bit(house, undisturbed):
    run = _new_run(house, "stopped", DROPOUT)
    (run / "stop").touch()
    codes, outputs = _finish(_start(run, 2))
    assert codes == [STOPPED, STOPPED], outputs
    assert "stopped after step 1" in outputs[0]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-1"]

    (run / "stop").unlink()
    assert "resumed from step-1" in _train(run, 2, "--resume")[0]
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "samples"):
        assert _of(key, run) == _of(key, undisturbed), key
    ours, theirs = (read_tensors(folder / "checkpoints" / "step-4") for folder in (run, undisturbed))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_final_adapter_loads_with_plain_peft_and_changes_the_output(house, undisturbed):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(house / "models" / "tiny", dtype=torch.bfloat16)
    ids = torch.tensor([[1, 300, 400, 500, 2]])
    before = base(input_ids=ids).logits
    model = PeftModel.from_pretrained(base, undisturbed / "checkpoints" / "step-4" / "adapter")
    assert not torch.equal(model(input_ids=ids).logits, before)
    master = read_tensors(undisturbed / "checkpoints" / "step-4")
    for name, value in model.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value, master[f"master/{name.replace('.default', '')}"].bfloat16()), name


def test_resuming_with_another_rank_of_lora_is_refused_with_exit_code_4(house, undisturbed):
    run = house / "runs" / "other-recipe"
    shutil.copytree(undisturbed, run)
    (run / "recipe.toml").write_text(load_recipe("tiny", DROPOUT | {"lora.rank": "8"}).to_toml())
    codes, outputs = _finish(_start(run, 1, "--resume"))
    assert codes == [WRONG_CHECKPOINT]
    assert "cannot resume from" in outputs[0] and "lora.rank was 16 and is 8" in outputs[0]
    assert "Traceback" not in outputs[0]


def test_force_goes_on_with_another_recipe_but_not_with_other_tensors(house, undisturbed):
    run = house / "runs" / "forced"
    shutil.copytree(undisturbed, run)
    (run / "recipe.toml").write_text(load_recipe("tiny", DROPOUT | {"optimizer.lr": "1e-4", "steps": "5"}).to_toml())
    output = _train(run, 1, "--resume", "--force")[0]
    assert "going on all the same, as --force says" in output and "optimizer.lr was 0.005 and is 0.0001" in output
    assert _of("step", run) == [1, 2, 3, 4, 5]

    (run / "recipe.toml").write_text(load_recipe("tiny", DROPOUT | {"lora.rank": "8"}).to_toml())
    codes, outputs = _finish(_start(run, 1, "--resume", "--force"))
    assert codes == [WRONG_CHECKPOINT]
    assert "which trains other tensors, such as base_model.model" in outputs[0] and "Traceback" not in outputs[0]


def test_validation_looks_at_every_held_out_token_once_and_the_best_checkpoint_is_kept(house, on_two):
    """Held against plain PEFT with the saved adapter, over samples that two ranks shared unevenly."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    held_out = open_prepared(on_two / "data" / "prepared" / "validation")
    base = AutoModelForCausalLM.from_pretrained(house / "models" / "tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, on_two / "checkpoints" / "step-4" / "adapter").eval()
    loss, correct, learned = 0.0, 0, 0
    for row in range(held_out.rows):
        for sample in held_out.row(row):
            wanted = torch.as_tensor(sample.labels)[1:]
            with torch.no_grad():
                logits = model(input_ids=torch.as_tensor(sample.ids)[None]).logits[0, :-1]
            loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            correct += (logits.argmax(1) == wanted).sum().item()
            learned += (wanted != -100).sum().item()
    seen = [line for line in _metrics(on_two) if "validation_loss" in line]
    assert [line["step"] for line in seen] == [3, 4], "every third step and the last"
    assert held_out.rows % 4, "micro-batches of 2 on 2 ranks: one of them has less to look at"
    assert seen[-1]["validation_loss"] == pytest.approx(loss / learned, rel=1e-5)
    assert seen[-1]["perplexity"] == pytest.approx(math.exp(loss / learned), rel=1e-4)
    assert seen[-1]["token_accuracy"] == pytest.approx(correct / learned)
    best = min(seen, key=lambda line: line["validation_loss"])["step"]
    assert (on_two / "checkpoints" / "best").read_text().strip() == f"step-{best}"
    assert read_state(on_two / "checkpoints" / f"step-{best}").validation_loss == pytest.approx(
        next(line["validation_loss"] for line in seen if line["step"] == best)
    )


def test_a_killed_rank_ends_the_run_on_the_other_machine_within_seconds(house):
    run = _new_run(house, "killed", DROPOUT | {"steps": "500"})
    started = _start(run, 2, path=AS_ON_A_NODE)
    until((run / "metrics.jsonl").exists, "the first step", 120)
    victim = int(
        subprocess.check_output(["pgrep", "-P", str(started[1].pid), "-f", "training.node.finetune"]).split()[0]
    )
    os.kill(victim, signal.SIGKILL)
    codes, outputs = _finish(started)
    assert codes[0] == PEER_LOST, outputs
    assert "lost contact with another rank" in (run / "logs" / "failure-rank-0.txt").read_text()
