"""What machines tell a run: that the cloud reclaims a node (the nodes write it on the head), and whose data disk this
is (/data/spotune-disk.json)."""

from __future__ import annotations

import calendar
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from training.run import folder as run_folder
from training.run.causes import Cause
from training.text.files import bounded_json

FOLDER = Path("/run/spotune/reclaim")
SAFETY_S = 30.0
"""Of what is left until a node goes: to end the ranks, to collect their logs, to write down why."""
LEAST_S = 5.0
"""The ranks are given so much even where that little is left."""
TIME = "%Y-%m-%dT%H:%M:%SZ"
ALL_AGAIN = "fab rebuild, or fab up and the base deploy where there is no snapshot"
"""What gives a cluster its machines back once one of them is gone."""
RELEASE = "release"
BEFORE_RELEASE_S = 300.0
"""A run leaves so long before the machines are released, as at a spot notice; earlier where its ranks need longer."""
EVERYBODY = ""
"""As the node of a notice: all of them."""

Clock = Callable[[float], str]
"""Writes seconds since 1970."""


@dataclass(frozen=True)
class Notice:
    """One node is taken back; times in seconds since 1970."""

    node: str
    at: float
    noticed: float


def parse_notice(text: str) -> Notice:
    """The notice in a file's text. Raises ValueError where there is none."""
    content = bounded_json(text)
    try:
        return Notice(str(content["node"]), _seconds(content["at"]), _seconds(content["noticed"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no notice: {text[:80]!r}") from error


def _seconds(text: str) -> float:
    return calendar.timegm(time.strptime(text, TIME))


def parse_notices(texts: Iterable[str]) -> list[Notice]:
    """The notices among some texts; what is none is passed over."""
    notices = []
    for text in texts:
        with contextlib.suppress(ValueError):
            notices.append(parse_notice(text))
    return notices


def read_notices(folder: Path) -> list[Notice]:
    """Every notice in a folder."""
    texts = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
    return parse_notices(texts)


def release_text(at: float) -> str:
    """What the file RELEASE says."""
    return time.strftime(TIME, time.gmtime(at))


def read_release(folder: Path) -> float | None:
    """When the machines are released; None where nothing, or nothing readable, says so."""
    with contextlib.suppress(OSError, ValueError):
        return _seconds((folder / RELEASE).read_text(encoding="utf-8").strip())
    return None


def _utc(at: float) -> str:
    return f"{time.strftime('%H:%M', time.gmtime(at))} UTC"


def pending(notices: Iterable[Notice], nodes: Iterable[str], now: float) -> list[Notice]:
    """Those of these nodes whose time is still to come, the soonest first."""
    wanted = set(nodes)
    return sorted((n for n in notices if n.node in wanted and n.at > now), key=lambda n: (n.at, n.node))


def words(notices: Sequence[Notice], clock: Clock = _utc) -> str:
    """Who goes when, as the beginning of a sentence. `clock` writes a moment: in UTC on a node."""
    all_go = [
        f"the machines are released at {clock(notice.at)}, when their time is over"
        for notice in notices
        if notice.node == EVERYBODY
    ]
    spot = [notice for notice in notices if notice.node != EVERYBODY]
    return "; ".join([*([_spot_words(spot, clock)] if spot else []), *all_go])


def _spot_words(notices: Sequence[Notice], clock: Clock) -> str:
    each = [(notice.node, clock(notice.at)) for notice in notices]
    verb = "is" if len(each) == 1 else "are"
    if len({at for _, at in each}) == 1:
        return f"{_list([node for node, _ in each])} {verb} being reclaimed at {each[0][1]} (spot)"
    return f"{_list([f'{node} at {at}' for node, at in each])} {verb} being reclaimed (spot)"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def newest_step(run_dir: Path) -> int | None:
    """The step of a run's newest checkpoint; a folder of that name is a whole one."""
    return run_folder.newest_step(path.name for path in (run_dir / run_folder.CHECKPOINTS).glob("*"))


@dataclass
class Reclaims:
    """What a supervisor knows of its run's nodes being reclaimed."""

    nodes: tuple[str, ...]
    since: float
    """When the supervisor began: older notices, of a time that has passed, are of machines that are gone."""
    folder: Path = FOLDER
    known: dict[str, Notice] = field(default_factory=dict)

    def look(self, now: float, needs_s: float = 0.0) -> bool:
        """Look once; whether there is something new. `needs_s`: what the ranks need to save and to leave."""
        fresh = {
            notice.node: notice
            for notice in read_notices(self.folder)
            if notice.node in self.nodes and (notice.at > now or notice.noticed >= self.since)
        }
        at = read_release(self.folder)
        if at is not None and self.since < at <= now + max(BEFORE_RELEASE_S, needs_s + SAFETY_S):
            fresh[EVERYBODY] = Notice(EVERYBODY, at, self.since)
        before = dict(self.known)
        self.known.update(fresh)
        return self.known != before

    @property
    def notices(self) -> list[Notice]:
        """All so far, the soonest first."""
        return sorted(self.known.values(), key=lambda notice: (notice.at, notice.node))

    def left_s(self, now: float) -> float:
        """Seconds the ranks may still have to save and to leave."""
        return max(LEAST_S, self.notices[0].at - now - SAFETY_S)

    def leave_at(self, needs_s: float) -> float:
        """When the ranks have to begin to leave, in seconds since 1970: as late as the first that goes allows, since
        nothing else is to be had sooner. `needs_s`: as in `look`."""
        return min(0.0 if each.node == EVERYBODY else each.at - SAFETY_S - needs_s for each in self.notices)

    @property
    def leaving(self) -> str:
        """What the run does about it."""
        return f"{words(self.notices)}: saving now, leaving shortly before"

    def cause(self, saved: bool | None = None, step: int | None = None) -> Cause:
        """The same as a value; `step`: of the newest checkpoint."""
        spot = any(notice.node != EVERYBODY for notice in self.notices)
        return Cause("reclaimed" if spot else "released", at=self.notices[0].at, saved=saved, step=step)

    def ending(self, cause: Cause) -> str:
        """Why the run ended, and with which checkpoint it can go on."""
        if cause.saved:
            return f"{words(self.notices)}; saved at step {cause.step}"
        left = "there is no checkpoint" if cause.step is None else f"the newest checkpoint is of step {cause.step}"
        return f"{words(self.notices)}; the ranks did not save in time, {left}"


RECORD = "spotune-disk.json"


@dataclass(frozen=True)
class DiskRecord:
    """What a data disk says of itself."""

    cluster: str
    disks: tuple[str, ...]
    """Serials, oldest first; the last one is this disk's own."""

    @property
    def generation(self) -> int:
        """1 for a disk that was blank; one more for each disk made from a snapshot since."""
        return len(self.disks)


def record_text(record: DiskRecord) -> str:
    """A record as the JSON of its file."""
    return json.dumps(asdict(record)) + "\n"


def parse_record(text: str) -> DiskRecord | None:
    """The record in a file's text; None where it is damaged."""
    try:
        content = bounded_json(text)
        record = DiskRecord(str(content["cluster"]), tuple(str(disk) for disk in content["disks"]))
    except (ValueError, TypeError, KeyError):
        return None
    return record if record.disks else None


def next_record(record: DiskRecord | None, cluster: str, disk: str) -> DiskRecord:
    """What a disk's record is to be, from the one found on it."""
    if record is None:
        return DiskRecord(cluster, (disk,))
    return DiskRecord(cluster, record.disks if record.disks[-1] == disk else (*record.disks, disk))
