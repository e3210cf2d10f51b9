"""Which checkpoint of a run on a head counts: the best, the newest, the newest that is whole."""

from __future__ import annotations

import shlex

from training.laptop.head_node import Head
from training.learned import wanted_step
from training.run_folder import CHECKPOINTS, newest_step
from training.sums import ADAPTER, BEST, MODEL_CONFIG, OPTIMIZER, STATE, SUMS


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
