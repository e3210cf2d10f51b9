"""`fab data`: what data hold and what a model will learn of them, before anything is started. On this machine where the
model's tokenizer is here, else on the head."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from training.data import DataError, can_check_here
from training.data.hub import download, is_dataset_name
from training.data.look.content import Look, look_from, surveyed
from training.data.look.survey import Tell, survey
from training.data.look.take import look_into
from training.data.readers import Source, left_aside, paths_of
from training.goal import SFT
from training.laptop import make_run, preparing, tokenizer_here
from training.laptop.base_model import BUILT_IN, find_base_model
from training.laptop.head_node import HeadError
from training.laptop.hub import another, download_command, hub_address, mirror
from training.laptop.open_cluster import LOOKS_HERE, OpenCluster, opened
from training.laptop.start_run import KINDS_OF_DATA, Data, files_of
from training.laptop.starting import turn
from training.own_model import FOLDER
from training.recipe import Recipe

KIND = "look"
"""What the folder of a look on the head is called by."""
EXTRA = "pip install -e '.[data]'"


@dataclass(frozen=True)
class Question:
    """What to look at, and how."""

    data: tuple[str, ...]
    model: str
    """As it was typed."""
    recipe: Recipe | None
    """None: what can be seen without a model."""
    show: int = 3
    skip_bad: bool = False
    here: bool = False
    """Nothing is asked of the head."""
    settings: tuple[str, ...] = ()
    """Of `--set`, as they were typed."""

    @property
    def flags(self) -> str:
        """`--data` as it was typed, with a blank before it."""
        return "".join(f" --data {shlex.quote(each)}" for each in self.data)

    @property
    def of_folder(self) -> bool:
        """Whether the model is a folder on this machine."""
        return bool(self.recipe and self.recipe.base_model.startswith(FOLDER))


def look(asked: Question, now: datetime, tell: Tell) -> Look:
    """The look. Raises DataError, LaunchError, and what an ssh connection raises."""
    if not asked.data and (asked.recipe is None or asked.recipe.base_model != BUILT_IN):
        raise DataError(f"say which data: --data FILE: {KINDS_OF_DATA}")
    if asked.show < 0:
        raise DataError(f"--show {asked.show}: a number of samples, from 0")
    with files_of(asked.data, asked.recipe.goal if asked.recipe else SFT) as given:
        return _look(asked, given, now, tell)


def aside(asked: Question) -> str:
    """Which files of the data's folders are not read; empty where all are."""
    if any(map(is_dataset_name, asked.data)):
        return ""
    return left_aside(paths_of(asked.data))


def next_step(asked: Question, found: Look) -> str:
    """What to type now."""
    if not found.usable:
        return "next: mend what is said above, and look again"
    if asked.recipe is None:
        return f"next: what is learned, and lengths in tokens: fab data --model NAME{asked.flags}"
    more = [" --skip-bad"] if found.skipped and found.bad else []
    more += [f" --set {shlex.quote(setting)}" for setting in asked.settings]
    more += [" --here"] if asked.here else []
    more += [" --anyway"] if found.few is not None else []
    elsewhere = "" if asked.here else "; with --here on this machine alone"
    return f"next: fab train --model {shlex.quote(asked.model)}{asked.flags}{''.join(more)} --dry{elsewhere}"


def _look(asked: Question, given: Data, now: datetime, tell: Tell) -> Look:
    home = tokenizer_here.home_of(asked.recipe) if asked.recipe else None
    lacks = _lacks(asked, home)
    source = _source(asked, given, bool(lacks))
    found = survey(source, tell) if source and can_check_here(source) else None
    if asked.recipe is None and found is None:
        raise DataError(f"{asked.flags.strip()} is looked at on the head: say --model NAME")
    if found and (asked.recipe is None or (found.refused and (lacks or not found.readable))):
        return surveyed(found, asked.skip_bad)
    assert asked.recipe
    if not lacks and source and found:
        tokenizer, config = tokenizer_here.loaded(home)
        return look_into(
            source, found, asked.recipe, tokenizer, config, show=asked.show, skip_bad=asked.skip_bad, tell=tell
        )
    lacks = lacks or ("" if find_spec("pyarrow") else f"reading Parquet needs pyarrow: {EXTRA}")
    instead = LOOKS_HERE if given.from_hub and not lacks else ""
    if asked.of_folder:
        raise DataError(f"--model {asked.model}: a folder is looked at on this machine, but {lacks}")
    if asked.here:
        said = f"--here: {lacks}; without --here the head is asked"
        if found is None:
            raise DataError(said)
        return replace(surveyed(found, asked.skip_bad), refused=said)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(opened(False, instead))
            stack.enter_context(turn(cluster.head))
        except (InventoryError, HeadError) as error:
            if found is None:
                raise
            said = f"{lacks}; the head cannot be asked instead: {error}"
            return replace(surveyed(found, asked.skip_bad), refused=said)
        return _on_head(cluster, asked, given, now, tell)


def _source(asked: Question, given: Data, leave_to_head: bool) -> Source | None:
    """Where the data lie on this machine; None for a data set of the Hub that the head is to download."""
    if not given.from_hub:
        return given.source
    if leave_to_head or not (asked.here or asked.of_folder):
        return None
    return download(asked.data[0], Path.home() / ".cache" / "spotune" / "cache" / "datasets", hub_address(), another())


def _lacks(asked: Question, home: Path | None) -> str:
    """What this machine lacks to tokenise; empty where it has all."""
    if missing := tokenizer_here.missing():
        return f"this Python lacks {', '.join(missing)}: {EXTRA}"
    if asked.recipe and home is None and asked.recipe.base_model != BUILT_IN:
        repo = f"{asked.recipe.base_model} --revision {asked.recipe.revision}"
        fetch = download_command(f"{repo} --include '*.json' --include '*.jinja' --include tokenizer.model", mirror())
        where = "" if mirror() else " from the mirror that HF_ENDPOINT names, or the Hub"
        return f"the tokenizer of {asked.recipe.base_model} is not on this machine; {fetch} fetches it{where}"
    return ""


def _on_head(cluster: OpenCluster, asked: Question, given: Data, now: datetime, tell: Tell) -> Look:
    """In a folder like a run's, which is gone afterwards. A run that goes on is not disturbed."""
    assert asked.recipe
    with make_run.claimed(cluster.head, KIND, now) as run_id:
        launch = cluster.launch(run_id, "training.node.look")
        find_base_model(cluster.head, asked.recipe, launch, cluster.models)
        make_run.put_new(cluster.head, launch, {"recipe.toml": asked.recipe.to_toml(), **given.files})
        arguments = ["--run", launch.run_dir, "--show", str(asked.show), *(["--skip-bad"] if asked.skip_bad else [])]
        command = preparing.program_command(launch, launch.module, arguments, from_hub=given.from_hub)
        with cluster.head.talk(command) as program:
            for message in program.messages():
                if "look" in message:
                    names = given.names(launch.run_dir) or {message["source"]: asked.data[0]}
                    return look_from(_named(message["look"], names))
                tell(str(message["doing"]), int(message["records"]))
    raise DataError(f"{asked.flags.strip()}: the head looked at them and told nothing")


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """The same with the user's own name for the data in all texts that name where they lay on the head."""
    if isinstance(value, str):
        return preparing.renamed(value, names)
    if isinstance(value, dict):
        return {key: _named(inner, names) for key, inner in value.items()}
    return [_named(inner, names) for inner in value] if isinstance(value, list) else value
