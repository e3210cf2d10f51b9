"""Nodes that are to take part in a run that goes on: asked for by MEMBERS in its folder, and looked at beforehand, so
that no run stops for a node that is not fit."""

from __future__ import annotations

import contextlib
import shlex
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from training.node.supervision.nodes import NodeError, make_ready, on_hosts, ship_all, ssh
from training.node.supervision.regroup import CannotGoOn, refitted
from training.plan.refit import Members, parse_members
from training.recipe.reading import read_recipe
from training.run.folder import MEMBERS, RECIPE
from training.run.launch import Host, Launch
from training.text.files import ORIGIN

MODEL_S = 20.0


class Admission:
    """What the file asks for, for the ranks of one launch."""

    members: Members | None = None
    """The nodes that the run is to go on with, once those that come are ready."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._file = launch, Path(launch.run_dir) / MEMBERS
        self._text = ""
        self._answer: Members | Exception | None = None

    def look(self) -> Members | None:
        """Look once; `members` once they are ready. Raises CannotGoOn where they will not be."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if not self._text and (text := self._file.read_text(encoding="utf-8")):
                self._text = text
                threading.Thread(target=self._get_ready, daemon=True).start()
        if self._answer is None:
            return None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self._file.read_text(encoding="utf-8") == self._text:  # else more was asked for meanwhile
                self._file.unlink()
        answer, self._text, self._answer = self._answer, "", None
        if isinstance(answer, NodeError):
            raise CannotGoOn(f"{answer.node} is not ready: {answer}") from answer
        if isinstance(answer, Exception):
            raise CannotGoOn(f"{MEMBERS}: {answer}") from answer
        self.members = answer
        return answer

    def _get_ready(self) -> None:
        """Thread."""
        try:
            self._answer = self._ready(parse_members(self._text))
        except Exception as error:  # whatever it is, the run goes on as it is
            self._answer = error

    def _ready(self, members: Members) -> Members:
        """Its nodes, those of them that come made ready. Raises CannotGoOn, NodeError, ValueError."""
        there = [(host.name, host.private_address) for host in self._launch.hosts]
        wanted = [(host.name, host.private_address) for host in members.hosts]
        if wanted[:1] != there[:1] or wanted == there:
            raise ValueError("it has another head, or the nodes that there are")
        refitted(self._launch, members.hosts, members.machines)
        if new := tuple(host for host in members.hosts if (host.name, host.private_address) not in there):
            recipe = read_recipe(Path(self._launch.run_dir) / RECIPE)
            if errors := on_hosts(
                new, partial(_must_have_model, Path(self._launch.models) / recipe.model_dir / ORIGIN)
            ):
                raise errors[0]
            launch = replace(self._launch, hosts=(self._launch.hosts[0], *new))
            make_ready(launch, new)
            ship_all(launch, new)
        return members


def _must_have_model(folder: Path, host: Host) -> None:
    """NodeError where a node has not the base model that the head has."""
    files = [folder / ORIGIN, folder / "config.json"]
    own = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    if ssh(host.name, f"cat {shlex.join(map(str, files))} 2>/dev/null; true", MODEL_S) != own:
        raise NodeError(host.name, f"it has not {folder} as the head has; the base deploy brings it there")
