"""What a run has learned, at its folder's `adapter` or `model`: a link to the checkpoint that counts. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.bounded import bounded_json
from training.run_folder import CHECKPOINTS, checkpoint_folder, checkpoint_steps, newest_step
from training.sums import BEST, SUMS, parse_sums, sha256_of
from training.verify import DamagedError, FetchError, part_of, verify_checkpoint


@dataclass(frozen=True)
class LaidDown:
    """What a run's link leads to now."""

    step: int | None
    """Of the checkpoint; None where the run has none, and there is no link."""
    newest: int | None
    """Step of the newest checkpoint there is: beyond `step` where an earlier one is the best."""
    damaged: tuple[str, ...]
    """What is wrong with checkpoints that would have come before this one, a phrase each."""


def lay_down(run: Path) -> LaidDown:
    """Link to the checkpoint that counts, verified, in a run folder of this machine. Raises FetchError where none is
    whole, or what was learned is not what the run should have made."""
    checkpoints = run / CHECKPOINTS
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    best = (checkpoints / BEST).read_bytes().decode("utf-8", "replace") if BEST in names else ""

    def take(step: int) -> None:
        name = checkpoint_folder(step)
        check_sums(run / name, sums_at(run / name))
        verify_checkpoint(run / name, planned_base_model(run))
        point(run, Path(name))

    step, damaged = take_whole(names, best, take)
    return LaidDown(step, newest_step(names), damaged)


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


def planned_base_model(run: Path) -> str | None:
    """The base model's hash a run was started with."""
    path = run / "plan.json"
    try:
        plan: dict[str, Any] = bounded_json(path.read_text(encoding="utf-8"))
        return plan.get("base_model_hash")
    except (AttributeError, OSError, ValueError) as error:
        raise FetchError(f"{path} cannot be read, so nothing says which base model it was ({error})") from error


def parsed_sums(text: str, folder: Path | str) -> dict[str, str]:
    """What a checkpoint should hold, by file. Raises DamagedError."""
    try:
        return parse_sums(text)
    except ValueError as error:
        raise DamagedError(f"{folder} is damaged: {error}") from error


def sums_at(folder: Path) -> dict[str, str]:
    """The same of a checkpoint on this machine; nothing where there is none."""
    path = folder / SUMS
    return parsed_sums(path.read_text(encoding="utf-8", errors="replace"), folder) if path.exists() else {}


def check_sums(folder: Path, sums: dict[str, str]) -> None:
    """DamagedError where a file is not what these sums say."""
    for file, digest in sums.items():
        if not (folder / file).is_file() or sha256_of(folder / file) != digest:
            raise DamagedError(f"{folder / file} is missing or damaged")


def point(run: Path, checkpoint: Path) -> None:
    """A link `adapter` or `model` in the run folder, to what the checkpoint holds of that name."""
    part = part_of(run / checkpoint)
    link, target = run / part, checkpoint / part
    fresh = link.with_name(f".{link.name}.{os.getpid()}.new")  # a run that ends and a fetch may do it at once
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
