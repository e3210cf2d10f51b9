"""A run's folder: what is in it, and how its two living files are read and written.

    /data/runs/RUN_ID/       on every node; here, after a fetch: runs/RUN_ID/
      recipe.toml  plan.json  launch.json     what is to be trained, what was promised, on which nodes and how
      training/  data/                        the code, and the records with what was prepared of them
      base-model.json  versions.json          what it began from, under which packages
      status.json                             the supervisor's: state, and the cause of a failure
      starts.jsonl  metrics.jsonl  tb/        each start, each step (rank 0's)
      logs/                                   launcher.log, supervisor.log, rank-N.log, events.jsonl
      checkpoints/step-N/                     see training/node/checkpoint.py
      adapter/                                a link to the best or newest of them; model/ after full fine-tuning
      report.html  measured.json              at the end

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from training.run.causes import MISTAKES, NONE, Cause, parse_cause
from training.run.events import MARK
from training.text.files import bounded_json, is_figure, object_in

DATA_DISK = Path("/data")
"""Where every node's data disk is mounted."""
REMOTE_RUNS = DATA_DISK / "runs"
"""Where runs live on every node."""
LOCAL_RUNS = Path("runs")
"""Where they are fetched to, and where `--here` runs live."""

RECIPE, PLAN = "recipe.toml", "plan.json"
MACHINES = "machines.json"
"""What its nodes have (training/plan/refit.py)."""
MEMBERS = "members.json"
"""The nodes that a run which goes on is to have from now on, where somebody asks for that."""
STATUS = "status.json"
METRICS = "metrics.jsonl"
LAUNCH = "launch.json"
STOP = "stop"
SAVE = "save"
"""Asks the ranks for a checkpoint; rank 0 takes it away."""
RESULT = "result.json"
PROVE = "prove"
"""What the ids of runs begin with that `fab prove` makes."""
REPORT, REPORT_FACTS = "report.html", "report-facts.json"
"""A page, and what it shows of files that stay on the head: a fetch brings the facts, and the page is made again."""
FETCHED = ".fetched"
"""Written by a fetch into the folder at home, first of all; nothing of this name is fetched."""
MEASURED = "measured.json"
"""What a run took against its plan (training/plan/calibration.py)."""
VERSIONS = "versions.json"
MODEL_RECORD, MODEL_SUMS = "base-model.json", "base-model.SHA256SUMS"
"""Which base model a run began from: repository, revision, commit, and the sha256 of each of its files."""
PREPARING = "preparing"
"""In the folder of a run that is not started yet; one that stays is of a start that was interrupted."""
BY_HAND = "by-hand.txt"
"""The command line of each node that starts a run without its supervisor."""
CLAIM = "claim"
"""What that file is called once the run is ready: it tells this run from every other of the same id."""
GO = "go"
"""There once a run that was started early is to begin."""
PROFILE = "profile"
TRACE, SUMMARY = MERGED = ("trace.json.gz", "summary.txt")
"""Made of all ranks' profiles, in the folder of that name."""
HANG = "hang"
CHECKPOINTS = "checkpoints"
LAUNCHER_LOG = "logs/launcher.log"
LAUNCH_MARK = "--- launch"
"""In that log: a line before what each start of the ranks wrote."""

State = Literal["starting", "running", "waiting", "finished", "failed", "stopped"]
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("run_id", "state", "reason"), str),
    **dict.fromkeys(("started", "updated", "spent_before"), int | float),
    **dict.fromkeys(("ended", "price_h"), int | float | None),
    **dict.fromkeys(("planned_step_s", "measured_step_s"), int | float | None),
    **dict.fromkeys(("exit_code", "failed_rank"), int | None),
    "failed_node": str | None,
    "currency": str,
    **dict.fromkeys(("changes", "lost_steps"), int),
    "lost_s": int | float,
    "lost_cost": int | float | None,
    "last_lines": list,
    "supervisor_pid": int,
}
COUNTS = frozenset({"changes", "lost_steps", "lost_s", "lost_cost"})
ENDED: frozenset[str] = frozenset({"finished", "failed", "stopped"})
_CHECKPOINT = re.compile(r"step-([0-9]{1,11})")
_RUN_ID = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]*)-(?P<time>[0-9]{8}-[0-9]{6})")


def new_run_id(name: str, now: datetime) -> str:
    """`<recipe>-<yyyymmdd-hhmmss>`, in UTC: the same string in the unit, the folder and the fetched copy."""
    return f"{name}-{now.astimezone(UTC):%Y%m%d-%H%M%S}"


def begun(run_id: str) -> float:
    """When a run of this id was made, in seconds since 1970; 0 where the id says none."""
    match = _RUN_ID.fullmatch(run_id)
    try:
        at = datetime.strptime(match["time"], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp() if match else 0.0
    except ValueError:
        return 0.0
    return at if at > 0 and is_figure(at) else 0.0


def was_made_in(folder: Path) -> bool:
    """Whether the run of a folder of this machine ran there, and was not fetched. The path is absolute."""
    return _made_at(folder) == str(folder) and not (folder / FETCHED).exists()


def was_fetched_to(folder: Path) -> bool:
    """Whether a fetch says so, whatever was fetched; or it says that it ran elsewhere. One that says nothing may have
    ended before it could."""
    return (folder / FETCHED).exists() or _made_at(folder) not in {"", str(folder)}


def _made_at(folder: Path) -> str:
    return str(object_in(folder / LAUNCH).get("run_dir", ""))


def is_run_id(text: str) -> bool:
    """Whether a text can be a run id; nothing else is ever joined to a path or a command."""
    return _RUN_ID.fullmatch(text) is not None


def run_of(folder: Path) -> str:
    """The run in whose folder another lies; empty where that is none of a run."""
    return folder.parent.name if is_run_id(folder.parent.name) else ""


def recipe_of(run_id: str) -> str:
    """The recipe (or `check`) a run id begins with."""
    match = _RUN_ID.fullmatch(run_id)
    if match is None:
        raise ValueError(f"{run_id!r} is not a run id like tiny-20260131-154500")
    return match["name"]


def unit_of(run_id: str) -> str:
    """The systemd unit of a run."""
    return f"spotune-{run_id}"


def recipe_before(step: int) -> str:
    """Where a recipe is kept that another took the place of, from this step on."""
    return f"recipe.before-{step}.toml"


def checkpoint_name(step: int) -> str:
    """The folder of a whole checkpoint; one half written or set aside is called otherwise."""
    return f"step-{step}"


def checkpoint_folder(step: int) -> str:
    """Its place in the run's folder."""
    return f"{CHECKPOINTS}/{checkpoint_name(step)}"


def checkpoint_steps(names: Iterable[str]) -> list[int]:
    """The steps of the whole checkpoints among names of folders, ascending."""
    return sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))


def newest_step(names: Iterable[str]) -> int | None:
    """The last of them."""
    return max(checkpoint_steps(names), default=None)


@dataclass(frozen=True)
class Status:
    """What the supervisor last said about a run. Times are seconds since the epoch, on the head's clock."""

    run_id: str
    state: State
    reason: str = ""
    """For people; `cause` says the same in values."""
    cause: Cause = NONE
    exit_code: int | None = None
    started: float = 0.0
    updated: float = 0.0
    ended: float | None = None
    failed_rank: int | None = None
    failed_node: str | None = None
    last_lines: tuple[str, ...] = field(default=())
    """The failing rank's own last words."""
    supervisor_pid: int = 0
    price_h: float | None = None
    """What an hour of its machines costs together; None where nobody said."""
    currency: str = ""
    spent_before: float = 0.0
    """What earlier starts of the run cost."""
    planned_step_s: float | None = None
    measured_step_s: float | None = None
    """Both are told where a run is far from its plan."""
    changes: int = 0
    """How often it went on by itself with other machines, and has done steps since."""
    lost_steps: int = 0
    """Done again because of that; this and what follows in all starts of the run."""
    lost_s: float = 0.0
    lost_cost: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    @property
    def mistake(self) -> bool:
        """Whether it failed because of what it was given: recipe, data, base model or checkpoint."""
        return self.cause.kind in MISTAKES

    def changed(self, **values: Any) -> Status:
        """A copy with other values."""
        return replace(self, **values)


def status_text(status: Status) -> str:
    """A status as the JSON of status.json."""
    return json.dumps(asdict(status), indent=1) + "\n"


def parse_status(text: str) -> Status:
    """The status in a JSON text; keys that are not known are ignored. Raises ValueError where it is none."""
    known = set(Status.__dataclass_fields__)
    status = bounded_json(text)
    if not isinstance(status, dict):
        raise ValueError("no status")
    content = {key: value for key, value in status.items() if key in known}
    for key, kinds in _KINDS.items():
        value = content.get(key)
        sized = is_figure(value) if isinstance(value, int | float) else isinstance(value, kinds)
        if key in content and not (sized and isinstance(value, kinds) and not (key in COUNTS and (value or 0) < 0)):
            raise ValueError(f"{key} is {value!r:.60}")
    if missing := {"run_id", "state"} - content.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    if content["state"] not in get_args(State):
        raise ValueError(f"state is {content['state']!r}")
    content["cause"] = parse_cause(content.get("cause"))
    content["last_lines"] = tuple(str(line) for line in content.get("last_lines", ()))
    return Status(**content)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new one, nothing between."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def parse_metrics(data: bytes) -> tuple[list[dict[str, Any]], int, int]:
    """The complete lines at the start of some bytes of metrics.jsonl, how many bytes they took, and how many of them
    are none: a head that lost its power has cut a line, and a resume writes on behind it.

    A last line still being written is left for the next look.
    """
    end = data.rfind(b"\n") + 1
    rows, bad = [], 0
    for line in data[:end].decode("utf-8", errors="replace").split("\n"):
        try:
            row = bounded_json(line) if line.strip() else {}
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows += [row] if row else []
        else:
            bad += 1
    return rows, end, bad


_LINE = re.compile(r"^(?:[\w.-]+: )?(?:\[(?P<rank>\d+)\] )?(?:\[rank\d+\]: )?(?P<text>.*)$", re.MULTILINE)
"""Before what was written: its node and rank, and where torch wrote it the rank again; none before ssh's own words."""
_NOISE = re.compile(rf"\s*$|{MARK}|.*(\[INFO\] \[(launch|runner|multinode_runner)\.py:| NCCL INFO )")
"""Nothing, events, DeepSpeed's launcher at work, and what NCCL says of itself."""
_WARNING = re.compile(r": \w*Warning: ")


def own_lines(text: str) -> list[str]:
    """What the ranks wrote since the last start, of a log: once what several of them wrote alike, and once a warning of
    a library. Indented lines go with the line before them."""
    blocks: list[list[re.Match[str]]] = []
    last_of: dict[str, list[re.Match[str]]] = {}
    for line in _LINE.finditer(text.rpartition(f"{LAUNCH_MARK}\n")[2]):
        if _NOISE.match(line["text"]):
            continue
        if line["text"].startswith(" ") and line["rank"] in last_of:
            last_of[line["rank"]].append(line)
        else:
            last_of[line["rank"]] = [line]
            blocks.append(last_of[line["rank"]])
    lines: list[str] = []
    of_rank: Counter[tuple[str, str]] = Counter()
    shown: Counter[str] = Counter()
    for block in blocks:
        words = "\n".join(line["text"] for line in block)
        of_rank[block[0]["rank"], words] += 1
        if shown[words] < (1 if _WARNING.search(words) else of_rank[block[0]["rank"], words]):
            shown[words] += 1
            lines += [line[0] for line in block]
    return lines
