"""Which checkpoint of a run counts: the best, the newest, the newest that is whole."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from training.laptop.head_node import Head
from training.run_folder import CHECKPOINTS, checkpoint_steps, newest_step
from training.sums import ADAPTER, BEST, MODEL_CONFIG, OPTIMIZER, STATE, SUMS
from training.verify import DamagedError, FetchError


def wanted_step(names: list[str], best: str) -> int | None:
    """The best checkpoint's step where `best`, the file's text, names one of these folders; else the newest's."""
    return newest_step([best.strip()] if best.strip() in names else names)


def take_whole(names: list[str], best: str, take: Callable[[int], None]) -> tuple[int | None, tuple[str, ...]]:
    """Take the wanted checkpoint, or where that is damaged the newest that is not; gives its step, and what is wrong
    with those passed over. FetchError where none is whole."""
    steps = checkpoint_steps(names)[::-1]
    wanted, damaged = wanted_step(names, best), []
    for step in sorted(steps, key=lambda step: step != wanted):
        try:
            take(step)
        except DamagedError as error:
            damaged.append(str(error))
        else:
            return step, tuple(damaged)
    if damaged:
        raise FetchError(f"no checkpoint is whole: {'; '.join(damaged)}")
    return None, ()


def checkpoint_step(head: Head, run_id: str) -> int | None:
    """The step of a run's best checkpoint, else of its newest: what a fetch would bring."""
    folder = f"{shlex.quote(str(head.runs / run_id))}/{CHECKPOINTS}"
    names, _, best = head.shell(f"cd {folder} 2>/dev/null || exit 0; ls; echo; cat {BEST} 2>/dev/null; true").partition(
        "\n\n"
    )
    return wanted_step(names.split(), best)


def newest_checkpoint(head: Head, run_id: str) -> int | None:
    """The step of a run's newest checkpoint, by what its folder is called."""
    folder = f"{shlex.quote(str(head.runs / run_id))}/{CHECKPOINTS}"
    return newest_step(head.shell(f"ls {folder} 2>/dev/null; true").split())


def whole_checkpoint(head: Head, run_id: str) -> tuple[int | None, list[int]]:
    """The step of the newest checkpoint whose checksums hold, and the steps of the damaged ones after it."""

    def listed(*names: str) -> str:
        return " && ".join(f"grep -q '  {name}$' {SUMS}" for name in names)

    answer = head.shell(
        f"cd {shlex.quote(str(head.runs / run_id))}/{CHECKPOINTS} 2>/dev/null || exit 0; "
        "for n in $(ls | sed -n 's/^step-\\([0-9][0-9]*\\)$/\\1/p' | sort -rn); do "
        f"(cd step-$n && sha256sum --check --strict --status {SUMS} && {listed(OPTIMIZER, STATE)} && "
        f"{{ {{ {listed(*ADAPTER)}; }} || {listed(MODEL_CONFIG)}; }} && "
        f"test $(find . -type f ! -path ./{SUMS} | wc -l) = $(wc -l < {SUMS})) 2>/dev/null && echo whole $n && break; "
        "echo damaged $n; done",
        600,
    )
    words = [line.split() for line in answer.splitlines()]
    whole = [int(step) for state, step in words if state == "whole"]
    return (whole[0] if whole else None), [int(step) for state, step in words if state == "damaged"]
