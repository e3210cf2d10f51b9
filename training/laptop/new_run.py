"""The folder of a run on a head: its id, what is shipped there, and the earlier adapter that it begins with."""

from __future__ import annotations

import io
import json
import secrets
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from training.data.file_names import NAMES, names_text
from training.data.hub import POINTER, HubDataSet
from training.data.readers import DataSummary, check
from training.data.sample import CURE, DataError
from training.data.shapes import refuse_other_goal
from training.data.source import Data, can_check_here, data_of, given, placed
from training.laptop import runs
from training.laptop.head_node import Head, HeadError, HereHead
from training.laptop.on_head import fs, run_folders
from training.laptop.open_cluster import Session
from training.laptop.start_lock import StartLock, locked_start
from training.models import tiny
from training.recipe.base import TINY
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe
from training.recipe.tables import DPO, Lora
from training.run.folder import (
    BY_HAND,
    CLAIM,
    LAUNCH,
    LOCAL_RUNS,
    PLAN,
    PREPARING,
    STATUS,
    Status,
    checkpoint_folder,
    is_run_id,
    new_run_id,
    status_text,
)
from training.run.history import RECORD, WEIGHTS, EarlierStage, parse_record, record_text
from training.run.launch import Launch, LaunchError, launch_text
from training.run.launchers import launcher_files, lines_by_hand
from training.text.files import ADAPTER_WEIGHTS, STATE, SUMS, bounded_json, parse_sums

TRIES = 10
"""Seconds after `now` that an id may bear where others have taken the earlier ones."""
SOURCE = Path(__file__).parents[1]
STAYS = "laptop"
"""The folder that no node needs."""
SHIPPED_SUFFIXES = {".py", ".toml", ".jinja", ".json"}


def code_files(source: Path = SOURCE) -> dict[str, Path]:
    """Our own training code, by its place in the run folder."""
    return {
        f"training/{path.relative_to(source)}": path
        for path in sorted(source.rglob("*"))
        if path.suffix in SHIPPED_SUFFIXES
        and "__pycache__" not in path.parts
        and path.relative_to(source).parts[0] != STAYS
    }


def launch_files(launch: Launch) -> dict[str, str]:
    """How the run is started; written anew by a resume, which may have other nodes."""
    return {LAUNCH: launch_text(launch), **launcher_files(launch)}


def plan_text(
    launch: Launch, model_dir: str, base_model_hash: str, data: Mapping[str, Any], predicted: Mapping[str, Any]
) -> str:
    """plan.json: what the run was meant to be, to hold its results against."""
    plan = {
        "run_id": launch.run_id,
        "world_size": launch.world_size,
        "hosts": [asdict(host) for host in launch.hosts],
        "model_dir": model_dir,
        "base_model_hash": base_model_hash,
        "data": dict(data),
        "predicted": dict(predicted),
    }
    return json.dumps(plan, indent=1) + "\n"


def pack(files: Mapping[str, Path | str], archive: Path) -> None:
    """Write files, given as paths or texts by their place in the run folder, into one tar; with their times."""
    now = int(time.time())
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            info.mtime = now
            if isinstance(content, Path):
                about = content.stat()
                info.size, info.mtime = about.st_size, int(about.st_mtime)
                with content.open("rb") as file:
                    tar.addfile(info, file)
            else:
                data = content.encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@contextmanager
def new_run_folder(head: Head, name: str, now: datetime) -> Iterator[str]:
    """The id of a new run, whose folder is made: whoever makes it has the id. Nothing of it is left where it was not
    started inside. Raises HeadError."""
    token = secrets.token_hex(16)
    ids = [new_run_id(name, now + timedelta(seconds=later)) for later in range(TRIES)]
    run_id = head.ask(run_folders.reserve, head.runs, ids, token)
    if run_id not in ids:
        raise HeadError(f"{head.name}: no folder {ids[0]} could be made at {head.runs}, nor one of the next {TRIES} s")
    try:
        yield run_id
    finally:
        with suppress(HeadError):  # the reason is being raised already
            head.ask(run_folders.discard, head.runs / run_id, token)


def start_ranks(
    cluster: Session,
    kind: str,
    now: datetime,
    module: str,
    *,
    files: Mapping[str, Path | str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Start ranks that are no training as trainings are started. `kind`: what their run id begins with."""
    head = cluster.head
    with locked_start(cluster) as lock, new_run_folder(head, kind, now) as run_id:
        launch = cluster.launch_of(run_id, module)
        launch = replace(launch, env={**launch.env, **(env or {})})
        plan = {"run_id": run_id, "cluster": cluster.name, "hosts": [host.name for host in launch.hosts]}
        upload_new_run(head, launch, {PLAN: json.dumps(plan, indent=1) + "\n", **(files or {})})
        lock.start_supervisor(launch)
    return launch


def upload_new_run(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Ship code, data and metadata into a new run folder."""
    upload(head, launch, {**code_files(), **launch_files(launch), **files})


def resumed_launch(cluster: Session, run_id: str, force: bool) -> Launch:
    """How a run goes on from its newest checkpoint, on the nodes there are now."""
    head, old = cluster.head, runs.read_launch(cluster.head, run_id)
    launch = cluster.launch_of(run_id, old.module, ("--resume", *(["--force"] if force else [])))
    return replace(launch, stop_grace_s=old.stop_grace_s, hang_s=old.hang_s, spent_before=_spent(head, old, launch))


def upload_resumed(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Today's code, the launch and `files` into the folder of a run that goes on."""
    head.ask(fs.remove, f"{launch.run_dir}/training")
    upload(head, launch, {**code_files(), **launch_files(launch), **files})


def _spent(head: Head, old: Launch, new: Launch) -> float:
    """What the starts of a run until now have cost, in the currency it goes on in."""
    if old.currency != new.currency:
        return 0.0
    so_far = runs.look(head, old.run_id).cost
    return old.spent_before if so_far is None else so_far


def upload(head: Head, launch: Launch, files: Mapping[str, Path | str]) -> None:
    """Some more files into a run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / f"spotune-{launch.run_id}.tar.gz"
        pack(files, archive)
        head.put(archive, Path(launch.run_dir))


def leave_by_hand(cluster: Session, launch: Launch, lock: StartLock) -> None:
    """Put a planned run on all nodes and say what starts its ranks there; nothing runs yet, and no supervisor will.
    The nodes need no ssh between them. Raises HeadError where one could not take it; the run stays one that was not
    started."""
    head, lines = cluster.head, lines_by_hand(launch)
    typed = "".join(f"{line}  # on {node}\n" for node, line in lines.items())
    lock.refuse_lost()
    upload(head, launch, {**launcher_files(launch), BY_HAND: typed})
    cluster.copy_run(launch)
    lock.refuse_lost()
    folder, now = head.runs / launch.run_id, time.time()
    head.ask(fs.rename, folder / PREPARING, folder / CLAIM)
    reason = f"started by hand ({BY_HAND}): nobody watches it"
    status = Status(launch.run_id, "stopped", reason, started=now, updated=now, ended=now)
    head.ask(fs.write, folder / STATUS, status_text(status))
    print(f"{launch.run_id} lies in {folder} on {', '.join(lines)}; nothing runs yet. Type on each of them its line:")
    print(typed, end="")


IN_THE_WEIGHTS = ("base_model", "tuning", *(f"lora.{key}" for key in Lora.model_fields if key != "dropout"))
"""Keys of a recipe on which depend which tensors an adapter has, and what they mean."""


@dataclass(frozen=True)
class EarlierAdapter:
    """The adapter of a run as a fetch would bring it, and all that is said of it."""

    head: Head
    """Where it lies: where the new run will be, or this machine."""
    stages: tuple[EarlierStage, ...]
    """The last one is it."""
    base_model: str
    """Hash of its base model's files."""
    recipe_text: str

    @property
    def run_id(self) -> str:
        return self.stages[-1].run_id

    @property
    def weights(self) -> Path:
        """On its head."""
        stage = self.stages[-1]
        return self.head.runs / stage.run_id / checkpoint_folder(stage.step) / "adapter" / ADAPTER_WEIGHTS

    def recipe(self, overrides: Mapping[str, str]) -> Recipe:
        """Its run's own recipe, with `overrides`. Raises RecipeError."""
        return parse_recipe(self.recipe_text, overrides, f"recipe of {self.run_id}")

    def refuse_other(self, recipe: Recipe) -> None:
        """LaunchError where a recipe has another adapter, or one on another model; where it needs this adapter twice,
        once to learn and once as it was."""
        self._refuse_as_reference(recipe)
        mine, wanted = self.recipe({}).compute_keys(), recipe.compute_keys()
        if differs := [key for key in IN_THE_WEIGHTS if mine.get(key) != wanted.get(key)]:
            differences = ", ".join(f"{key} {mine.get(key)}, not {wanted.get(key)}" for key in differs)
            raise LaunchError(
                f"--from-adapter {self.run_id}: it has {differences}; an adapter goes on as it is: leave --model out "
                "to take its own recipe"
            )

    def refuse_other_base(self, base_model: str) -> None:
        """LaunchError where this is another base model's hash."""
        if self.base_model != base_model:
            raise LaunchError(
                f"--from-adapter {self.run_id}: it was trained on another base model ({self.base_model[:12]}) than "
                f"the one that lies there ({base_model[:12]})"
            )

    def _refuse_as_reference(self, recipe: Recipe) -> None:
        """The reference of goal dpo is the policy that a stage begins with (arXiv 2305.18290, section 4); with the
        adapter off it would be the base model without what the earlier run has learned."""
        if recipe.is_dpo:
            home = "--here" if self.head.here else "--fetch"
            here = " --here" if self.head.here else ""
            raise LaunchError(
                f"--from-adapter {self.run_id}: goal = {DPO} needs what {self.run_id} has learned as its reference "
                f"too, unchanged; make it a model: fab merge {home} --run {self.run_id}, then fab train --model "
                f"./{LOCAL_RUNS}/{self.run_id}/merged --data FILE --set goal={DPO}{here}"
            )

    def put(self, head: Head, launch: Launch) -> None:
        """Weights and record into a new run's folder, compared with their checksum. Raises LaunchError."""
        files: dict[str, Path | str] = {RECORD: record_text(self.stages)}
        if self.head is head:
            head.ask(fs.copy, self.weights, f"{launch.run_dir}/{WEIGHTS}")
        else:
            files[WEIGHTS] = self.weights
        upload(head, launch, files)
        wanted = self.stages[-1].adapter
        if head.ask(fs.sha256, f"{launch.run_dir}/{WEIGHTS}") != wanted:
            raise LaunchError(f"--from-adapter {self.run_id}: {self.weights} is damaged on {self.head.name}")


def find_earlier(head: Head, run_id: str) -> EarlierAdapter:
    """The adapter of a run on the head, else of one that was fetched. LaunchError where neither has it."""
    if not is_run_id(run_id):
        raise LaunchError(f"--from-adapter {run_id}: the id of a run is expected, as fab status lists them")
    for place in (head, HereHead(LOCAL_RUNS)):
        if (step := runs.checkpoint_step(place, run_id)) is not None:
            return _read(place, run_id, step)
    raise LaunchError(f"--from-adapter {run_id}: no checkpoint of it is on {head.name} or below {LOCAL_RUNS.resolve()}")


def _read(head: Head, run_id: str, step: int) -> EarlierAdapter:
    folder = checkpoint_folder(step)
    try:
        sums = parse_sums(runs.file_of(head, run_id, f"{folder}/{SUMS}"))
        state = bounded_json(runs.file_of(head, run_id, f"{folder}/{STATE}"))
        before = parse_record(head.ask(fs.text, head.runs / run_id / RECORD) or "")
        digest = sums.get(f"adapter/{ADAPTER_WEIGHTS}")
        if digest is None:
            raise LaunchError(f"--from-adapter {run_id}: it trained the whole model, there is no adapter to go on with")
        stage = EarlierStage(run_id, step, digest, str(state["data"]))
        return EarlierAdapter(head, (*before, stage), str(state["base_model"]), runs.recipe_text(head, run_id))
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"--from-adapter {run_id}: its checkpoint step-{step} cannot be read: {error}") from error


TRAIN = "data/train"
"""Of a run folder: what its data are called there, but for the suffix of a single file."""
KINDS_OF_DATA = "JSONL, JSON, CSV, TSV or Parquet, a folder of them, or OWNER/NAME"


@dataclass(frozen=True)
class TrainingData:
    """What the user gave: its files by their place in the run folder, and what they hold where that is known here."""

    files: Mapping[str, Path | str]
    summary: DataSummary | None = None
    skip_bad: bool = False
    """Records that cannot be used are left out."""
    data: Data | None = None
    """The files of this machine; None for a data set of the Hub."""
    dataset: HubDataSet | None = None
    """The data set of the Hub that the head downloads."""

    @property
    def from_hub(self) -> bool:
        return self.dataset is not None

    @property
    def shipped(self) -> dict[str, Path | str]:
        """The files, with what the user calls them."""
        names = {f"data/{NAMES}": names_text(self.files, self.data.source, "data/")} if self.data else {}
        return {**self.files, **names}


@contextmanager
def checked_data(recipe: Recipe, data: Sequence[str] = (), skip_bad: bool = False) -> Iterator[TrainingData]:
    """`training_data`, for as long as the `with` lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield training_data(recipe, data, Path(folder), skip_bad)


@contextmanager
def files_of(data: Sequence[str], goal: str) -> Iterator[TrainingData]:
    """The data as they are given, unchecked, for as long as the `with` lasts; those of `tiny` where none are."""
    with tempfile.TemporaryDirectory() as folder:
        yield _placed_data(data, Path(folder), goal)


def training_data(recipe: Recipe, data: Sequence[str], folder: Path, skip_bad: bool = False) -> TrainingData:
    """The data, checked to their last record where this machine can read them; a data set of the Hub is left to the
    head. `tiny` has its own, made into `folder`. Raises DataError."""
    if not data and recipe.base_model != TINY:
        raise DataError(f"{recipe.name} needs --data FILE: {KINDS_OF_DATA}")
    unchecked = _placed_data(data, folder, recipe.goal)
    read = unchecked.data if unchecked.data and can_check_here(unchecked.data) else None
    summary = check(read, skip_bad, CURE) if read else None
    if summary:
        refuse_other_goal(summary.shape, recipe.goal)
    return replace(unchecked, summary=summary, skip_bad=skip_bad)


def _placed_data(data: Sequence[str], folder: Path, goal: str) -> TrainingData:
    source = given(data)
    if isinstance(source, HubDataSet):
        return TrainingData({f"{TRAIN}{POINTER}": str(source)}, dataset=source)
    if source is None:
        source = folder / "train.jsonl"
        tiny.write_data(source, goal)
    suffix = "" if isinstance(source, tuple) or source.is_dir() else source.suffix.lower()
    return TrainingData(placed(source, f"{TRAIN}{suffix}"), data=data_of(source))
