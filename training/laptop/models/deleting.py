"""`fab models.delete`: a base model's folder off every node, unless something there uses it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.new_run import wait_or_end
from training.laptop.open_cluster import Session
from training.laptop.starting import in_the_way, under_way
from training.models.names import Model, name_of_folder, resolve
from training.recipe.recipe import RecipeError
from training.run.folder import begun
from training.run.launch import LaunchError
from training.text.counts import size

SHOWN = 3
"""Runs that a sentence names."""

FOLDER = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Deletion:
    """A folder that goes."""

    folder: str
    """Its name below `models`."""
    models: str
    bytes_on: Mapping[str, int]
    """What it takes on each node that has it."""
    silent: Mapping[str, str]
    """Why the other nodes could not be asked: what lies there stays."""
    named: str = ""
    """How [models] names of cluster.toml calls it; empty where it does not."""

    @property
    def lines(self) -> Iterator[str]:
        """What goes, where, what that frees, and what brings it back."""
        total = size(sum(self.bytes_on.values()))
        yield f"delete  {self.models}/{self.folder}  on {', '.join(self.bytes_on)}: frees {total} in all"
        for name, why in self.silent.items():
            yield f"stays   on {name}, which could not be asked: {why}"
        if self.named:
            yield f'"{self.named}" stands in [models] names of cluster.toml: the next base deploy fetches it again'


def planned(cluster: Session, model: str, force: bool = False) -> Deletion:
    """What is to go of a model: a recipe's, one of the Hub by its id, or a folder by its name. Raises LaunchError where
    no node has it, where a run or another program uses it now, and, unless `force`, where runs with a checkpoint need
    it."""
    models = cluster.launch("none", "none").models
    answers = cluster.ask_all(f"cd {shlex.quote(models)} 2>/dev/null && du -sk */ 2>/dev/null; true")
    silent = {name: str(answer) for name, answer in answers.items() if isinstance(answer, Exception)}
    sizes = {name: _sizes(answer) for name, answer in answers.items() if isinstance(answer, str)}
    meant = _meant(model)
    folder = meant.place if meant else model
    if not (node_sizes := {name: folders[folder] for name, folders in sizes.items() if folder in folders}):
        known = sorted({each for folders in sizes.values() for each in folders})
        own = "; a folder of your own is never deleted" if meant and meant.base.folder else ""
        raise LaunchError(f"{_nowhere(cluster, model, models, known)}{own}")
    _refuse_used(cluster, models, folder)
    if not force and (users := _trained_from(cluster.head, folder)):
        more = f" and {len(users) - SHOWN} more" if len(users) > SHOWN else ""
        raise LaunchError(
            f"{folder} is the base model of {', '.join(users[:SHOWN])}{more}, which cannot be asked, merged or resumed "
            "without it; nothing was deleted. Delete those runs first, or say --force"
        )
    return Deletion(folder, models, node_sizes, silent, name_of_folder(cluster.models, folder))


def _nowhere(cluster: Session, model: str, models: str, known: Sequence[str]) -> str:
    """That it is not there, and what is."""
    lacks = f"no node has {model}" if cluster.settings else f"this machine does not have {model}"
    return f"{lacks} at {models}; there are: {', '.join(known) or 'none'}"


def _meant(model: str) -> Model | None:
    """None where it names no model, and may be a folder that lies there."""
    try:
        return resolve(model)
    except RecipeError:
        if FOLDER.fullmatch(model):
            return None
        raise


def _sizes(listing: str) -> dict[str, int]:
    """Bytes by folder, from what `du -sk` said."""
    lines = (line.split("\t", 1) for line in listing.splitlines())
    return {name.rstrip("/"): int(kib) * 1024 for kib, name in lines}


def _refuse_used(cluster: Session, models: str, folder: str) -> None:
    head = cluster.head
    if starting := under_way(head):
        raise LaunchError(in_the_way(head, starting))
    if (run_id := runs.active(head)) and runs.plan_of(head, run_id).get("model_dir") == folder:
        raise LaunchError(f"{run_id} trains {folder} now; {wait_or_end(head, run_id)}")
    for name, answer in cluster.ask_all(_users_command(models, folder)).items():
        if isinstance(answer, str) and (users := answer.splitlines()):
            raise LaunchError(f"{folder} is in use on {name} by {'; '.join(users[:3])}; end that first")


def _trained_from(head: Head, folder: str) -> list[str]:
    """The runs with a checkpoint that have the folder as their base model, the newest first."""
    names = runs.with_checkpoint(head)
    used = [name for name in names if runs.plan_of(head, name).get("model_dir") == folder]
    return sorted(used, key=begun, reverse=True)


def _users_command(models: str, folder: str) -> str:
    """A shell command that prints pid and command of every process that has the folder's files in its memory, or its
    path among its words; its own line does not have the path, only this pattern."""
    path = re.sub(r"([^\w/-])", r"[\1]", f"{models}/{folder}").replace("/", "[/]", 1)
    words, maps = shlex.quote(f"(^|=){path}(/|$)"), shlex.quote(f"{path}/")
    return (
        f"for p in $({{ grep -slzE -e {words} /proc/[0-9]*/cmdline; grep -slE -e {maps} /proc/[0-9]*/maps; }} "
        "| cut -d/ -f3 | sort -un); do "
        'printf "%s " "$p"; tr "\\000" " " 2>/dev/null </proc/$p/cmdline | head -c 100; echo; done'
    )


def delete(cluster: Session, deletion: Deletion) -> Mapping[str, str]:
    """Remove the folder from every node; why that failed, by the node's name."""
    answers = cluster.ask_all(f"cd {shlex.quote(deletion.models)} && rm -rf ./{shlex.quote(deletion.folder)}")
    return {name: str(why) for name in deletion.bytes_on if isinstance(why := answers[name], Exception)}
