"""A run's base model and what it learned where they lie, and programs that use them there. No torch."""

from __future__ import annotations

import json
import shlex
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inventory.node_program import Program
from training.cost.memory import NF4_WIDTH, WIDTH
from training.cost.shape import read_outline
from training.laptop import base_model, runs, start_lock
from training.laptop.download import Download, another
from training.laptop.head_node import Head, RemoteHead
from training.laptop.new_run import code_files, pack
from training.laptop.on_head import fs, machines
from training.laptop.open_cluster import Session
from training.recipe.base import Base
from training.recipe.tables import NF4
from training.run.checkpoint_files import FetchError
from training.run.events import RUN_VARIABLE
from training.run.folder import CLAIM, LOCAL_RUNS, checkpoint_folder, checkpoint_steps
from training.run.launch import Launch
from training.text.counts import size_text
from training.text.files import SUMS, parse_sums, sha256_of
from training.text.problems import AdapterError

DATA_REPORT = "data/prepared/train/report.json"
AFTER = "after"
"""In a run's folder: today's code and what it is asked, beside the code the run was trained with."""
MARGIN, RESERVE_BYTES = 1.1, 2 << 30
"""What a card needs beyond the weights, for what is computed and remembered."""


@dataclass(frozen=True)
class TunedModel:
    """What a checkpoint holds of what was learned and the base model it belongs to, on a head."""

    run_id: str
    step: int
    launch: Launch
    model: str
    packing_bytes: int = 0
    """What four bits a weight take off the base model's files, where the run had it so."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """What the run gave the chat template: asked otherwise, the model would answer what it has not learned."""
    whole: bool = False
    """Whether every weight was trained: a model of its own in the adapter's place."""
    asks: str = "prompt"
    """What records call a prompt that asks as the run's own did."""

    @property
    def learned(self) -> str:
        """The folder of the adapter, or of the whole model."""
        return f"{self.launch.run_dir}/{checkpoint_folder(self.step)}/{'model' if self.whole else 'adapter'}"

    @property
    def template_argv(self) -> list[str]:
        """The same as a command line's flag."""
        return ["--template-args", json.dumps(self.template_args)] if self.template_args else []

    @property
    def merged(self) -> str:
        """Where a merged model goes unless another place is said."""
        return f"{self.launch.run_dir}/merged"


def use_of_merged(about: TunedModel, folder: str, head: Head) -> str:
    """What to type once a model is merged into a folder of the head, or brought home from there."""
    flag = " --here" if head.here else ""
    deploy = about.launch.deploy or "run the base deploy"
    named = "" if head.here else f'add "{folder}" to [models] names in cluster.toml; {deploy}; then '
    train = f"next: {named}fab train --model {shlex.quote(folder)} --data FILE{flag} trains from it"
    own = Path(folder).resolve() == (home(about.run_id) / "merged").resolve()
    publish = f"fab publish --repo OWNER/NAME --run {about.run_id} --merged puts it on the hub; " if own else ""
    return f"{train}; {publish}transformers and vLLM load the folder"


def tuned_model(cluster: Session, run_id: str | None, checkpoint: str = "") -> TunedModel:
    """What is asked about: the newest run, its best checkpoint or else its newest. Raises LaunchError, AdapterError."""
    head = cluster.head
    run_id, note = runs.newest_with_checkpoint(head, run_id)
    if note:
        print(note, flush=True)
    step = chosen_step(*runs.checkpoint_names(head, run_id), checkpoint, run_id)
    whole = not head.ask(fs.exists, head.runs / run_id / checkpoint_folder(step) / "adapter")
    asks = "instruction" if runs.object_of(head, run_id, DATA_REPORT).get("shape") == "alpaca" else "prompt"
    launch = runs.read_launch(head, run_id)
    plan = runs.plan_of(head, run_id)
    model_dir = str(plan.get("model_dir", ""))
    if not model_dir or Path(model_dir).name != model_dir:
        raise AdapterError(f"{run_id}: its plan.json names no folder of {launch.models}: {model_dir!r}")
    recipe = tomllib.loads(runs.recipe_text(head, run_id))
    base = Base.parse(str(recipe.get("base_model", "")))
    base_model.refuse_gone(head, launch, model_dir, base, cluster.models)
    packing, args = packing_bytes(plan.get("predicted", {})), recipe.get("template_args", {})
    return TunedModel(run_id, step, launch, f"{launch.models}/{model_dir}", packing, args, whole, asks)


def packing_bytes(predicted: Mapping[str, Any]) -> int:
    """Of a run as its plan.json says it; 0 where its base stays as it is."""
    if predicted.get("base_precision") != NF4:
        return 0
    return int((WIDTH["bfloat16"] - NF4_WIDTH) * read_outline(predicted["shape"]).packed_parameters)


def chosen_step(names: Sequence[str], best: str, checkpoint: str, run_id: str) -> int:
    """The step of `checkpoint`: a number, `best`, `newest`, or nothing for what a fetch would bring."""
    known = checkpoint_steps(names)
    if not known:
        raise AdapterError(f"{run_id} has no checkpoint yet")
    if checkpoint == "best":
        if not best.strip():
            raise AdapterError(f"{run_id} has no best checkpoint: it was trained without validation")
        checkpoint = best.strip()
    if checkpoint == "newest" or not (checkpoint or best.strip()):
        return known[-1]
    checkpoint = checkpoint or best.strip()
    number = checkpoint.removeprefix("step-")
    if not number.isdigit() or int(number) not in known:
        raise AdapterError(
            f"{run_id} has no checkpoint {checkpoint}; there are {', '.join(map(str, known))}, best and newest"
        )
    return int(number)


@dataclass(frozen=True)
class Room:
    """A model against the head's first card."""

    model_bytes: int
    card_bytes: int | None
    """What is free of it; None where there is no card."""

    @property
    def too_big(self) -> bool:
        """Whether the model does not fit the card."""
        return self.card_bytes is not None and self.model_bytes * MARGIN + RESERVE_BYTES > self.card_bytes

    def words(self) -> str:
        """Both sizes."""
        return f"{size_text(self.model_bytes)} of weights, {size_text(self.card_bytes or 0)} free on the card"


def refuse_whole(head: Head, about: TunedModel, why: str) -> None:
    """AdapterError, with what is possible instead, where the run trained every weight."""
    if about.whole:
        fetched = f"once it is fetched fab train --model ./{home(about.run_id)}/model --data FILE"
        train = f"fab train --model {shlex.quote(about.learned)} --data FILE --here" if head.here else fetched
        raise AdapterError(
            f"{about.run_id} trained the whole model: {why}; {about.learned} is a plain model folder, which "
            f"transformers and vLLM load; {train} trains from it"
        )


def room_alone(head: Head, about: TunedModel, at_once: bool = False) -> Room:
    """The same for what uses the card, with the base as the run had it; `at_once`: beside a whole tuned model.
    LaunchError where a run uses it: its memory and its time are its own."""
    start_lock.refuse_second(head)
    unpacked = room(head, about.model, *([about.learned] if about.whole and at_once else []))
    return replace(unpacked, model_bytes=unpacked.model_bytes - about.packing_bytes)


def room(head: Head, *models: str) -> Room:
    """How large models are together, and how much of the head's card is free."""
    answer = head.ask(machines.room, list(models))
    return Room(answer["model_bytes"], answer["card_free"])


def start(
    head: Head, about: TunedModel, module: str, argv: Sequence[str], files: Mapping[str, Path | str] | None = None
) -> AbstractContextManager[Program]:
    """Start a program of training.node.adapter on the head, with today's code and some files beside it."""
    folder = Path(about.launch.run_dir) / AFTER
    with tempfile.TemporaryDirectory() as local:
        archive = Path(local) / "after.tar.gz"
        pack({**code_files(), **(files or {})}, archive)
        head.put(archive, folder)
    env = [f"{key}={value}" for key, value in about.launch.env.items() if key != RUN_VARIABLE]
    program = [about.launch.python, "-m", f"training.node.adapter.{module}", "--model", about.model]
    words = ["env", *env, *program, "--adapter", about.learned, *argv]
    return head.talk(f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}")


def max_length(head: Head, about: TunedModel) -> int:
    """Tokens the run kept of a record."""
    return int(tomllib.loads(runs.recipe_text(head, about.run_id))["max_length"])


def validation_folder(head: Head, about: TunedModel) -> str:
    """The run's own held-out split. AdapterError where it kept none."""
    folder = f"{about.launch.run_dir}/data/prepared/validation"
    if not head.ask(fs.exists, folder):
        raise AdapterError(
            f"{about.run_id} kept no validation split (validation.fraction is 0); "
            "give records it has not learned from: --data FILE.jsonl"
        )
    return folder


def refuse_another_run(head: Head, run_id: str) -> None:
    """FetchError where what lies at home under the run's id is another start's."""
    mine = home(run_id) / CLAIM
    theirs = head.ask(fs.text, head.runs / run_id / CLAIM) or ""
    if mine.is_file() and mine.read_text(encoding="utf-8", errors="replace").strip() != theirs.strip():
        raise another(home(run_id), "it is another start's, of the same second")


def fetch_folder(head: Head, remote: str, local: Path) -> int:
    """Bring a sealed folder home, every file verified; gives the bytes moved."""
    assert isinstance(head, RemoteHead)
    download = Download(head.open_sftp, remote, local)
    sums = parse_sums(download.text(SUMS))
    local.mkdir(parents=True, exist_ok=True)
    download.all([(name, local / name, digest) for name, digest in sums.items()])
    download.all([(SUMS, local / SUMS, None)])
    wrong = [name for name, digest in sums.items() if sha256_of(local / name) != digest]
    if wrong:
        raise FetchError(f"{local}: {', '.join(wrong)} came damaged; fetch again")
    return download.moved


def home(run_id: str) -> Path:
    """A run's folder on this machine."""
    return LOCAL_RUNS / run_id
