"""Goal dpo against TRL's DPOTrainer: the same records, tokenised by each, and the same losses step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support.ports import free_pair  # noqa: E402
from training.data.order import Order  # noqa: E402
from training.data.prepared import open_prepared  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.prepare import prepare  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.trl]

ROOT = Path(__file__).parents[2]
STEPS, ROWS, LR = 10, 4, 1e-3
SETTINGS = {
    "goal": "dpo",
    "dtype": "float32",
    "strategy": "zero0",
    "batching": "padding-free",
    "gradient_checkpointing": "false",
    "global_batch": str(ROWS),
    "micro_batch": "2",
    "steps": str(STEPS),
    "max_length": "96",
    "save_every": "100",
    "seed": "3",
    "lora.dropout": "0.0",
    "optimizer.lr": str(LR),
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": "0",
    "logging.tensorboard": "false",
}
TEMPLATE = (
    "{%- for message in messages %}{{- '\\n' if not loop.first }}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n<|im_start|>assistant\\n' }}{%- endif %}"
)
"""With nothing behind an answer's end of turn: that is learned by TRL, and by us is not."""
WAYS = {
    "sigmoid": ({}, {}),
    "sigmoid_norm": ({"dpo.length_normalised": "true", "dpo.beta": "2.0"}, {"loss_type": "sigmoid_norm", "beta": 2.0}),
    "smoothed": (  # of one pair a step TRL's aot is DPO with label smoothing
        {"dpo.label_smoothing": "0.2", "global_batch": "1", "micro_batch": "1"},
        {"loss_type": "aot", "label_smoothing": 0.2},
    ),
    "ipo": ({"dpo.loss": "ipo", "dpo.beta": "0.4"}, {"loss_type": "ipo", "beta": 0.4}),
}
KEYS = {
    "loss": "loss",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "grad_norm": "grad_norm",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """models/tiny, whose chat template writes nothing behind an end of turn."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("house")
    (folder / "models").mkdir()
    tiny.write_model(folder / "models" / "tiny", steps=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "models" / "tiny")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "models" / "tiny")
    return folder


def _call(*argv, **place):
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | place
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-m", *map(str, argv)], cwd=ROOT, env=environment, check=False, **pipes)
    assert done.returncode == 0, done.stdout[-3000:]


def _ours(house, name, settings):
    """A run of ours; gives its lines, and the numbers of the records in the order in which it took them."""
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    records = tiny.preferences()[:30]
    records[3]["chosen"][0]["content"] *= 5  # lengths far from equal; one is cut
    (run / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = load_recipe("tiny", SETTINGS | settings)
    (run / "recipe.toml").write_text(recipe.to_toml())
    prepare(run, skip_bad=False)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    _call("training.node.finetune", "--run", run, **place, MASTER_PORT=str(free_pair()))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = open_prepared(run / "data" / "prepared" / "train").rows
    order = Order(rows, recipe.seed, recipe.global_batch)
    return lines, [records[number] for step in range(STEPS) for number in order.step(step)]


def _theirs(house, name, pairs, dpo, rows):
    folder = house / f"trl-{name}"
    folder.mkdir()
    (folder / "model").symlink_to(house / "models" / "tiny")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = {"rows": rows, "steps": STEPS, "lr": LR, "seed": 3, "max_length": 96, "dpo": dpo}
    (folder / "job.json").write_text(json.dumps(job))
    _call("tests.support.trl_dpo", folder)
    return [line for line in json.loads((folder / "log.json").read_text()) if "loss" in line]


@pytest.mark.parametrize("way", WAYS)
def test_ten_steps_are_those_of_trls_trainer(house, way):
    settings, dpo = WAYS[way]
    ours, pairs = _ours(house, way.replace("_", "-"), settings)
    rows = int(settings.get("global_batch", ROWS))
    theirs = _theirs(house, way, pairs, dpo, rows)
    assert len(ours) == len(theirs) == STEPS
    for key, name in KEYS.items():
        right = [line[name] for line in theirs]
        assert [line[key] for line in ours] == pytest.approx(
            right, abs=1e-4, rel=1e-3 if key == "grad_norm" else 1e-4
        ), key
    assert len({round(line["loss"], 4) for line in ours}) > 5, "something is learned"
    assert [line["pairs"] for line in ours] == [rows] * STEPS
