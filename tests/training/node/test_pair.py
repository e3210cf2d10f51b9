"""Two ranks that share a replica, or own different parameters (tests/support/pair_probe.py), over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import forked_rank

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

pytestmark = pytest.mark.torch

PROBE = Path(__file__).parents[2] / "support" / "pair_probe.py"
LENGTHS = (3, 9, 5, 7, 4, 8)
"""Of the probe's rows; each has its own number plus ten for all its tokens."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What each of the two ranks saw."""
    out = tmp_path_factory.mktemp("pair") / "out.pt"
    codes, outputs = forked_rank.finish(forked_rank.start(2, PROBE, out), 300)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_go_to_replicas_and_what_two_ranks_of_one_see_counts_once(pair, replicas):
    first, second = (rank[f"{replicas} replicas"] for rank in pair)
    numbers = first["wanted"]
    rows = [number + 10 for number in numbers]
    if replicas == 1:
        assert sorted(first["learned"]) == sorted(second["learned"]) == sorted(rows)
        assert first["looked at"] == second["looked at"] == list(range(10, 16))
    else:
        assert sorted(first["learned"]) == sorted(rows[::2]) and sorted(second["learned"]) == sorted(rows[1::2])
        assert sorted(first["looked at"] + second["looked at"]) == list(range(10, 16))
    learned = sum(LENGTHS[number] - 1 for number in numbers)
    assert first["scale"] == second["scale"] == 1 / learned
    loss, correct, of, tokens, positions = first["step"]
    assert loss == sum((LENGTHS[number] - 1) * (number + 10) for number in numbers) / learned
    assert (of, tokens) == (learned, learned + 4)
    halves = [numbers[:2], numbers[2:]] if replicas == 1 else [numbers[::2], numbers[1::2]]
    assert positions == sum(2 * max(LENGTHS[number] for number in half) for half in halves), "padding included"
    assert correct in range(learned // 2 - 1, learned // 2 + 1)
    all_learned = sum(LENGTHS) - len(LENGTHS)
    total = sum((length - 1) * number for number, length in enumerate(LENGTHS, 10))
    assert first["evaluation"][0] == total / all_learned
    assert first["evaluation"][1] == pytest.approx(0.5, abs=1.5 / all_learned)
    assert first["step"] == second["step"] and first["evaluation"] == second["evaluation"]


def _by_one_process(steps):
    """The same parameters under torch's own clipping and AdamW: norms, and both parameters after each step."""
    from training.models.names import load_recipe

    settings = load_recipe("tiny").optimizer
    both = [torch.nn.Parameter(torch.arange(1.0, 4.0) + rank) for rank in (0, 1)]
    adam = torch.optim.AdamW(both, lr=1e-2, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    seen = []
    for step in steps:
        for rank, parameter in enumerate(both):
            parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (rank + 1) * (step + 1)
        norm = torch.nn.utils.clip_grad_norm_(both, 0.5).item()
        adam.step()
        seen.append((norm, [parameter.detach().clone() for parameter in both]))
    return seen


def test_ranks_that_own_different_parameters_clip_them_together_and_sum_none(pair):
    for step, (norm, parameters) in enumerate(_by_one_process(range(3))):
        for rank in (0, 1):
            grad_norm, skipped, _, owned = pair[rank]["owners"][step]
            assert grad_norm == pytest.approx(norm, rel=1e-6) and not skipped
            assert torch.allclose(owned, parameters[rank], rtol=1e-6, atol=0)


def test_an_overflow_on_one_owner_makes_all_of_a_replica_skip_together(pair):
    first, second = pair[0]["overflow"], pair[1]["overflow"]
    for told in (first, second):
        assert [skipped for _, skipped, _, _ in told] == [False, True, False]
        assert [scale for _, _, scale, _ in told] == [2.0**16, 2.0**15, 2.0**15]
        assert told[1][0] == float("inf") and torch.equal(told[1][3], told[0][3])
    for step, (norm, parameters) in zip((0, 2), _by_one_process((0, 2)), strict=True):
        for rank, told in enumerate((first, second)):
            assert told[step][0] == pytest.approx(norm, rel=1e-6)
            assert torch.allclose(told[step][3], parameters[rank], rtol=1e-5, atol=0)


def test_the_memory_of_a_step_is_that_of_the_rank_that_has_held_most(pair):
    (own, told), (most, also_told) = (rank["1 replicas"]["memory"] for rank in pair)
    assert told == also_told
    assert own + 0.2 < told == pytest.approx(most, abs=0.05)
