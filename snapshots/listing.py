"""The cluster's snapshots as the cloud lists them: what is inside, which one is wanted, and waiting for it.

A snapshot can have 20 tags of 128 characters. Nothing else says what is inside without making a disk of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Snapshot, Tags
from inventory.errors import InventoryError
from inventory.renting import recovery
from inventory.renting.ledger import SNAPSHOT, Ledger, with_tag
from inventory.renting.tags import WRITTEN_TAG, number
from inventory.settings import Settings
from inventory.terminal import console

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
        tags[WRITTEN_TAG] = f"{contents.written_gib:.3f}"
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


LATEST = "latest"
ACCOMPLISHED, PROGRESSING, FAILED = "accomplished", "progressing", recovery.FAILED


def usable(snapshot: Snapshot) -> bool:
    """Whether disks can be made from it."""
    return snapshot.is_available or snapshot.status == ACCOMPLISHED


def whole(snapshot: Snapshot) -> bool:
    """Whether its machine may be stopped: all of it is stored away from the disk."""
    return snapshot.status == ACCOMPLISHED


class SnapshotError(InventoryError, RuntimeError):
    """A snapshot failed, or is not what it should be; the message says which and what to do."""


def chosen(cloud: Cloud, settings: Settings, selector: str) -> Snapshot:
    """The snapshot an id or "latest" stands for. Raises RentError."""
    snapshots = all_snapshots(cloud, settings)
    if selector != LATEST:
        snapshots = (*snapshots, *cloud.snapshots(ids=[selector]))
    return choose(selector, snapshots, settings)


def all_snapshots(cloud: Cloud, settings: Settings) -> tuple[Snapshot, ...]:
    """The cluster's own, as the cloud's tags say; and by their ids those that lost the tag."""
    listed = cloud.snapshots(tags={CLUSTER_TAG: settings.name})
    lost = Ledger.of(cloud, settings).lost(SNAPSHOT, {each.snapshot_id for each in listed})
    return (*listed, *with_tag(lost, settings.name))


def newest_first(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    return sorted(snapshots, key=lambda s: (s.created, s.snapshot_id), reverse=True)


def of_data(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Without those of system disks."""
    return tuple(each for each in snapshots if each.disk_kind == "data")


def made_from(snapshot: Snapshot, disks: Sequence[Disk]) -> tuple[Disk, ...]:
    """The disks that were made from a snapshot."""
    return tuple(disk for disk in disks if disk.source_snapshot_id == snapshot.snapshot_id)


def choose(selector: str, snapshots: Sequence[Snapshot], settings: Settings) -> Snapshot:
    """The snapshot of a `selector`: an id, or "latest": the cluster's newest that did not fail.

    `snapshots`: for an id, what the region has of that id; for latest, those tagged as the cluster's.
    Raises RentError: none, failed, foreign, of a system disk, of another region.
    """
    if selector == LATEST:
        return _latest(snapshots, settings)
    cluster, region = settings.name, settings.rental.region
    snapshot = next((s for s in snapshots if s.snapshot_id == selector), None)
    if snapshot is None:
        raise RentError(
            f"there is no snapshot {selector} in {region}; snapshots belong to one region: one of another region has "
            f"to be copied here first (CopySnapshot, which costs a fee) and the copy tagged {CLUSTER_TAG}={cluster}. "
            "Known ones: fab snapshots.list"
        )
    if problem := unfit(snapshot, cluster):
        raise RentError(problem)
    return snapshot


def _latest(snapshots: Sequence[Snapshot], settings: Settings) -> Snapshot:
    cluster, region = settings.name, settings.rental.region
    ours = newest_first([s for s in snapshots if s.tags.get(CLUSTER_TAG) == cluster])
    if snapshot := recovery.newest(ours):
        return snapshot
    if ours:
        raise RentError(f"no snapshot of cluster {cluster!r} in {region} can be used: {unfit(ours[0], cluster)}")
    raise RentError(
        f"there is no snapshot of cluster {cluster!r} in {region}; fab snapshots.create makes one of a cluster that "
        f"stands. Without one: fab up, which takes te1's data disk where that is kept, then {settings.deploy_command}"
    )


def unfit(snapshot: Snapshot, cluster: str) -> str:
    """Why the cluster cannot be rebuilt from a snapshot; empty where it can, now or when it is ready."""
    owner = snapshot.tags.get(CLUSTER_TAG)
    what = f"{snapshot.snapshot_id} ({snapshot.name or 'no name'}, {snapshot.disk_kind} disk, {snapshot.disk_gib} GiB)"
    if snapshot.disk_kind != "data":
        return f"{what} is of a system disk: it holds no /data, and no data disk can be made from it"
    if owner is None:
        return (
            f"{what} has no tag {CLUSTER_TAG}: spotune did not make it. Where it is a copy of one of this cluster, tag "
            f"the copy {CLUSTER_TAG}={cluster}"
        )
    if owner != cluster:
        return f'{what} belongs to the cluster {owner!r}: name = "{owner}" in cluster.toml rebuilds that one'
    if snapshot.status == FAILED:
        return f"{what} failed: nothing can be made from it; fab snapshots.prune removes it"
    return ""


def size_note(snapshot: Snapshot, wanted_gib: int) -> str:
    """What becomes of the wanted disk size; empty where it is the snapshot's."""
    if wanted_gib > snapshot.disk_gib:
        return f"disks of {wanted_gib} GiB from a snapshot of {snapshot.disk_gib} GiB: the base deploy grows them"
    if wanted_gib < snapshot.disk_gib:
        return (
            f"data_disk_gib = {wanted_gib} is less than the snapshot's {snapshot.disk_gib} GiB: a disk cannot be "
            f"smaller than its snapshot, so {snapshot.disk_gib} GiB are made and billed"
        )
    return ""


PLAIN_EVERY_S = 5.0
Show = Callable[[str, float | None], None]
"""What is being waited for, and how much of it is done (0 to 1), where known."""


@contextmanager
def progress() -> Iterator[Show]:
    """A function for words and a share done: a bar in a terminal, a line now and then elsewhere."""
    terminal = console()
    if not terminal.is_terminal:
        yield _plain()
        return
    with Progress(
        BarColumn(30), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def show(words: str, share: float | None) -> None:
            bar.update(task, description=words, total=None if share is None else 1.0, completed=share or 0.0)

        yield show


def _plain() -> Show:
    printed, at = "", 0.0

    def show(words: str, share: float | None) -> None:
        nonlocal printed, at
        if words != printed and (share == 1.0 or time.monotonic() - at > PLAIN_EVERY_S):
            print(words, flush=True)
            printed, at = words, time.monotonic()

    return show


def wait(cloud: Cloud, snapshot_id: str, until: Callable[[Snapshot], bool], show: Show) -> Snapshot:
    """Look at a snapshot until it is as wanted. Raises SnapshotError where it failed or is gone."""
    while True:
        snapshot = next(iter(cloud.snapshots(ids=[snapshot_id])), None)
        if snapshot is None:
            raise SnapshotError(f"{snapshot_id} is gone: somebody deleted it")
        if snapshot.status == FAILED:
            raise SnapshotError(
                f"{snapshot_id} failed; was its machine stopped meanwhile? Remove it with fab snapshots.prune and "
                "take another: fab snapshots.create"
            )
        show(progress_words(snapshot), snapshot.progress_percent / 100)
        if until(snapshot):
            return snapshot
        time.sleep(cloud.pace.poll_s)


def wait_until_usable(cloud: Cloud, snapshot: Snapshot) -> None:
    """Until disks can be made from a snapshot, with a line that says how far it is."""
    if not usable(snapshot):
        with progress() as show:
            wait(cloud, snapshot.snapshot_id, usable, show)


def progress_words(snapshot: Snapshot) -> str:
    """How far a snapshot is, and what can be done with it already."""
    left = f", about {snapshot.remain_s} s left" if snapshot.remain_s else ""
    if whole(snapshot):
        return f"{snapshot.snapshot_id} is whole"
    state = "usable, being stored" if usable(snapshot) else "being made"
    return f"{snapshot.snapshot_id} {state}: {snapshot.progress_percent} %{left}"


def attended(cloud: Cloud, snapshot_id: str) -> bool:
    """Wait until a snapshot is complete; False after Ctrl-C."""
    try:
        with progress() as show:
            wait(cloud, snapshot_id, whole, show)
    except KeyboardInterrupt:
        return False
    return True
