"""What a snapshot holds: as values, as the tags it carries in the cloud, and as a table for people. Pure.

A snapshot can have 20 tags of 128 characters. Nothing else says what is inside without making a disk of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from inventory.cloud.values import CLUSTER_TAG, Tags
from inventory.renting.tags import WRITTEN_TAG, number

PREFIX = "spotune:"
KEEP_TAG = f"{PREFIX}keep"
"""On snapshots that no prune deletes."""
UNFROZEN_TAG = f"{PREFIX}unfrozen"
"""On snapshots taken while the file system was not at rest: as a power cut would leave it."""
YES = "yes"
MAX_CHARACTERS = 128
MODEL_TAGS = 4
"""Tags that may name models: all that the other facts and the call's own tag leave."""


@dataclass(frozen=True)
class Contents:
    """What lies on a data disk. Empty text and None: it is not there, or nobody knows."""

    cluster: str
    spotune: str = ""
    """Version that made the snapshot."""
    environment: str = ""
    """Hash of what was asked of the Python environment: interpreter, torch flavour, every pin."""
    torch: str = ""
    python: str = ""
    models: tuple[str, ...] = ()
    """Folders below /data/models."""
    models_unnamed: int = 0
    """Models beyond those the tags have room for."""
    run: str = ""
    """The newest training."""
    step: int | None = None
    """Of its newest checkpoint."""
    written_gib: float | None = None
    """What the file system says is used."""
    filesystem: str = ""
    keep: bool = False
    unfrozen: bool = False


TEXT_TAGS = {
    "version": "spotune",
    "env": "environment",
    "torch": "torch",
    "python": "python",
    "run": "run",
    "filesystem": "filesystem",
}
"""Tag, without its prefix -> field of Contents."""


def to_tags(contents: Contents) -> dict[str, str]:
    """The tags for a snapshot; what does not fit is counted, never cut."""
    tags = {CLUSTER_TAG: contents.cluster}
    for tag, name in TEXT_TAGS.items():
        value: str = getattr(contents, name)
        if value and len(value) <= MAX_CHARACTERS:
            tags[PREFIX + tag] = value
    if contents.step is not None:
        tags[f"{PREFIX}step"] = str(contents.step)
    if contents.written_gib is not None:
        tags[WRITTEN_TAG] = f"{contents.written_gib:.1f}"
    for tag, holds in ((KEEP_TAG, contents.keep), (UNFROZEN_TAG, contents.unfrozen)):
        if holds:
            tags[tag] = YES
    lines, left = _packed(quote(folder, safe="") for folder in contents.models)
    for n, line in enumerate(lines, 1):
        tags[f"{PREFIX}models-{n}"] = line
    if unnamed := left + contents.models_unnamed:
        tags[f"{PREFIX}models-more"] = str(unnamed)
    return tags


def _packed(texts: Iterable[str]) -> tuple[list[str], int]:
    """Texts joined into as many lines as there are tags for models; how many found no room."""
    lines: list[str] = []
    left = 0
    for text in texts:
        fitting = next((n for n, line in enumerate(lines) if len(line) + 1 + len(text) <= MAX_CHARACTERS), None)
        if fitting is not None:
            lines[fitting] += f" {text}"
        elif len(lines) < MODEL_TAGS and len(text) <= MAX_CHARACTERS:
            lines.append(text)
        else:
            left += 1
    return lines, left


def from_tags(tags: Tags) -> Contents:
    """What a snapshot's tags say; what they do not say, or say unreadably, stays empty."""
    texts = {name: tags.get(PREFIX + tag, "") for tag, name in TEXT_TAGS.items()}
    return Contents(
        cluster=tags.get(CLUSTER_TAG, ""),
        models=tuple(
            sorted(
                unquote(text) for n in range(1, MODEL_TAGS + 1) for text in tags.get(f"{PREFIX}models-{n}", "").split()
            )
        ),
        models_unnamed=int(number(tags, f"{PREFIX}models-more") or 0),
        step=None if (step := number(tags, f"{PREFIX}step")) is None else int(step),
        written_gib=number(tags, WRITTEN_TAG),
        keep=tags.get(KEEP_TAG) == YES,
        unfrozen=tags.get(UNFROZEN_TAG) == YES,
        **texts,
    )


def from_look(seen: Mapping[str, Any], cluster: str, spotune: str, keep: bool) -> Contents:
    """What `on_node/look.py` saw on a head's data disk."""
    environment, run = seen["environment"], seen["run"] or {}
    return Contents(
        cluster=cluster,
        spotune=spotune,
        environment=environment["stamp"].get("hash", ""),
        torch=environment["stamp"].get("torch", ""),
        python=environment["stamp"].get("python", ""),
        models=tuple(m["folder"] for m in seen["models"] if m["stamp"]),
        run=run.get("id", ""),
        step=run.get("step"),
        written_gib=round(seen["used_bytes"] / 2**30, 1),
        filesystem=seen["filesystem"],
        keep=keep,
    )


def in_words(contents: Contents) -> list[str]:
    """One line for each thing inside."""
    torch, python = contents.torch or "unknown", contents.python or "unknown"
    yes = f"environment {contents.environment[:12]} (torch {torch}, python {python})"
    models = [*contents.models]
    models += [f"{contents.models_unnamed} more"] if contents.models_unnamed else []
    checkpoint = "no checkpoint" if contents.step is None else f"checkpoint of step {contents.step}"
    return [
        yes if contents.environment else "no finished Python environment",
        f"models: {', '.join(models)}" if models else "no base model",
        f"newest run {contents.run}, {checkpoint}" if contents.run else "no run",
    ]
