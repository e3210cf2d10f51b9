"""`fab train --dry` as a user types it, with the data really prepared: the table, the four reasons, nothing left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs
from training.models import tiny

pytestmark = pytest.mark.torch
pytest.importorskip("transformers", reason="needs the [train] extra")

ROOT = Path(__file__).parents[3]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": tiny.VOCABULARY,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a base model like Qwen2.5's: it has the chat template, and ends with <|endoftext|>, which pads too.

    No weights: nothing before the launch reads them.
    """
    home = tmp_path_factory.mktemp("home")
    folder = home / ".cache" / "spotune" / "models" / "qwen2.5-14b"
    folder.mkdir(parents=True)
    tokenizer = tiny._tokenizer([text for _, text in tiny.docstrings()])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": end}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "bos_token_id": end}))
    (folder / "spotune-model.json").write_text(json.dumps({"hash": "0" * 64}))
    (home / "fabfile.py").write_text("from training.laptop.tasks import namespace\n")
    return home


def train(home: Path, records: int, *words: str) -> subprocess.CompletedProcess[str]:
    data = home / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in tiny.questions()[:records]))
    env = {**os.environ, "PYTHONPATH": programs.PATH, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    base = ("base_model=Qwen/Qwen2.5-14B", "model_dir=qwen2.5-14b", "max_length=256", "epochs=20")
    settings = [word for setting in base for word in ("--set", setting)]
    command = ["train", "--here", "--model", "qwen2.5-14b", "--data", str(data), *settings, *words]
    return subprocess.run(
        [sys.executable, "-m", "fabric", *command], cwd=home, env=env, capture_output=True, text=True, check=False
    )


def left(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "runs").glob("*"))


def test_the_articles_run_is_refused_for_four_named_reasons_and_leaves_nothing(home: Path):
    done = train(home, 15, "--set", "optimizer.warmup_steps=200", "--dry")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    reasons = done.stderr.strip().splitlines()
    assert [reason.split(":")[0] for reason in reasons] == ["records", "end of turn", "padding token", "warm-up"], (
        reasons
    )
    assert sum(line.startswith("error") for line in done.stdout.splitlines()) == 4
    assert left(home) == []


CURED = ('lora.trainable_tokens=["<|im_end|>"]', "pad_token=<|im_start|>", "save_every=10")


def test_cured_the_same_run_passes_dry_with_0_and_leaves_nothing(home: Path):
    settings = [word for setting in CURED for word in ("--set", setting)]
    done = train(home, 200, "--dry", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end of turn: <|im_end|>, whose row is trained" in done.stdout
    assert not any(line.startswith("error") for line in done.stdout.splitlines())
    assert left(home) == []


def test_epochs_of_few_records_shorten_the_warm_up_once_the_data_are_counted(home: Path):
    settings = [word for setting in (*CURED, "epochs=1", "batching=padded") for word in ("--set", setting)]
    done = train(home, 60, "--dry", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"^no warm-up: the recipe's 10 steps would last as long as the run's (\d)$", done.stderr, re.M)
    assert said and f"warm-up: 0 of {said[1]} steps" in done.stdout


def test_data_that_the_head_refuses_are_one_sentence_and_leave_nothing(home: Path):
    """No token fits into eight with the template's own words before it."""
    done = train(home, 200, "--set", "max_length=8", "--set", "pad_token=<|no such token|>")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip()
    assert left(home) == []
