"""Liger's kernels against our own loss, through the engine's own door; without a GPU by triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from training.node import liger, loss  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH, VOCABULARY = 32, 300
INTERPRETED = """
import json, torch
from training.node import liger, loss
calls = []
real = liger._loss()
liger._loss = lambda: lambda *a, **k: calls.append(1) or real(*a, **k)
found = liger.agreement(64, 1000, torch.float32, "cpu", rows=16)
chosen = liger.choose(64, 1000, torch.float32, "cpu")
before = len(calls)
hidden = torch.randn(20, 64, requires_grad=True)
head = torch.nn.Linear(64, 1000, bias=False).requires_grad_(False)
targets = torch.randint(1000, (1, 20)); targets[0, :5] = -100
both = loss.fuse(head, 16)(hidden[None], targets)
both[0].backward()
own = loss.own_cross_entropy(hidden[5:].detach(), head.weight, None, targets[0, 5:], 16)
print(json.dumps([found.value, found.gradient, chosen.taken, len(calls) - before, both.tolist(), own.tolist()]))
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "liger_kernel")),
    reason="needs the [kernels] extra: triton and liger-kernel, 0.7 GB",
)
def test_ligers_kernels_give_our_loss_through_the_engine_without_a_gpu():
    env = os.environ | {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
    command, root = [sys.executable, "-c", INTERPRETED], Path(__file__).parents[3]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    value, gradient, chosen, calls, ours, own = json.loads(done.stdout.splitlines()[-1])
    assert value < 1e-4 and gradient < 1e-4 and chosen and calls == 1
    assert ours == pytest.approx(own, rel=1e-5)


@pytest.fixture
def stood_in(monkeypatch):
    """`liger._loss` replaced as if kernels were installed and a GPU there."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(liger, "_refused", [])

    def put(kernel):
        monkeypatch.setattr(liger, "_loss", lambda: kernel)

    return put


def _ours(hidden, weight, targets):
    return loss.own_cross_entropy(hidden, weight, None, targets, 16)


def test_kernels_that_agree_are_used(stood_in):
    stood_in(_ours)
    chosen = liger.choose(WIDTH, VOCABULARY, torch.float32, "cpu")
    assert chosen.taken and "computed by Liger's kernels" in chosen.words
    assert liger.loss_for(torch.zeros(1)) is _ours


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, sums):
        return sums.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(liger.ROWS, WIDTH), grad


def _fails(*_, **__):
    raise RuntimeError("ptxas: no kernel image\nmore")


def _capped(hidden, weight, targets):
    logits = 100 * torch.tanh(hidden @ weight.T / 100)
    return torch.stack([torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), torch.zeros(())])


WRONG = {
    "cap": _capped,
    "value": lambda hidden, weight, targets: _ours(hidden, weight, targets) * 1.001,
    "gradient": lambda hidden, weight, targets: _WrongGradient.apply(hidden, _ours(hidden, weight, targets)),
    "nan": lambda hidden, weight, targets: _ours(hidden, weight, targets) * float("nan"),
    "failure": _fails,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_that_do_not_agree_are_left_and_that_is_said(stood_in, wrong):
    stood_in(WRONG[wrong])
    chosen = liger.choose(WIDTH, VOCABULARY, torch.float32, "cpu")
    assert not chosen.taken and "not used" in chosen.words and "\n" not in chosen.words
    assert liger.loss_for(torch.zeros(1)) is None
    hidden, weight = torch.randn(8, WIDTH), torch.randn(VOCABULARY, WIDTH)
    targets = torch.randint(VOCABULARY, (8,))
    assert torch.equal(loss.linear_cross_entropy(hidden, weight, None, targets, 16), _ours(hidden, weight, targets))


def test_without_a_gpu_there_is_nothing_to_choose(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert liger.choose(WIDTH, VOCABULARY, torch.float32, "cpu") is None


def test_kernels_are_left_where_the_head_they_are_tried_on_is_not_known(stood_in):
    stood_in(_ours)
    chosen = liger.choose(None, VOCABULARY, torch.float32, "cpu")
    assert not chosen.taken and "does not say" in chosen.words
    assert liger.loss_for(torch.zeros(1)) is None


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"model_type": "gpt2", "n_embd": 48, "vocab_size": 99}, (48, 99)),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 64, "vocab_size": 77}}, (64, 77)),
    ],
    ids=["another name", "text beside images"],
)
def test_a_heads_shape_is_known_whatever_the_configuration_calls_it(tmp_path, config, shape):
    from training.node.kernels import head_shape

    (tmp_path / "config.json").write_text(json.dumps(config))
    assert head_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("plan", "ours"),
    [
        ('{"predicted": {"own_loss": true}}', True),
        ('{"predicted": {"own_loss": false}}', False),
        ("{}", False),
        ("[1]", False),
        ("{cut", False),
        (None, False),
    ],
)
def test_a_run_takes_our_own_loss_where_its_plan_knows_it_as_the_faster(tmp_path, stood_in, monkeypatch, plan, ours):
    from training.node import kernels

    stood_in(_ours)
    monkeypatch.setattr(kernels, "head_shape", lambda _: (WIDTH, VOCABULARY))
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    said = []
    rank = SimpleNamespace(run_dir=tmp_path, rank0_broadcast=lambda work: work(), say=said.append)
    kernels.choose_loss(tmp_path, torch.float32, "cpu", rank)
    assert (liger.loss_for(torch.zeros(1)) is None) is ours
    assert len(said) == 1 and ("the faster on these cards" in said[0]) is ours
