"""Nodes that are to take part in a run that goes on: asked for by MEMBERS in its folder, or lost before and back. They
are looked at beforehand, so that no run stops for a node that is not fit."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from training.node.supervision.nodes import NodeError, make_ready, on_hosts, ship_all, ssh, unreachable
from training.node.supervision.regroup import CannotGoOn, refitted
from training.plan.refit import Members, parse_machines, parse_members
from training.recipe.reading import read_recipe
from training.run.folder import MACHINES, MEMBERS, RECIPE
from training.run.launch import Host, Launch
from training.text.files import ORIGIN

MODEL_S = 20.0
LOOK_S = 5.0


class Admission:
    """For the nodes that a run has now."""

    members: Members | None = None
    """The nodes that the run is to go on with, once those that come are ready."""

    def __init__(self, launch: Launch, hosts: tuple[Host, ...], absent: Collection[Host] = ()) -> None:
        """`launch`: of its last ranks; `hosts`: the nodes there are; `absent`: those that it lost."""
        self._launch, self._hosts, self._absent = launch, hosts, tuple(absent)
        self._file, self._text = Path(launch.run_dir) / MEMBERS, ""
        self._answering = set[str]()
        self._look_at = time.monotonic() + LOOK_S
        self._thread: threading.Thread | None = None
        self._answer: Members | Exception | None = None
        self._said = ""

    def look(self) -> Members | None:
        """Look once; `members` once they are ready. Raises CannotGoOn where they will not be; of a node that is back,
        once."""
        if not self._thread:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self._text = self._file.read_text(encoding="utf-8")
            if self._text:
                self._begin(lambda: parse_members(self._text))
            elif self._absent and time.monotonic() > self._look_at:
                self._begin(self._returned)
        if not self._thread or self._thread.is_alive():
            return None
        asked, self._text = self._text, ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if asked and self._file.read_text(encoding="utf-8") == asked:  # else more was asked for meanwhile
                self._file.unlink()
        answer, self._answer, self._thread = self._answer, None, None
        self._look_at = time.monotonic() + LOOK_S
        if isinstance(answer, Exception):
            said = f"{MEMBERS}: {answer}" if asked else str(answer)
            if isinstance(answer, NodeError):
                said = f"{answer.node} is not ready: {answer}"
            if asked or said != self._said:
                self._said = said
                raise CannotGoOn(said) from answer
            return None
        self.members = answer
        return answer

    def _begin(self, wanted: Callable[[], Members | None]) -> None:
        def get_ready() -> None:
            try:
                members = wanted()
                self._answer = members and self._ready(members)
            except Exception as error:  # whatever it is, the run goes on as it is
                self._answer = error

        self._thread = threading.Thread(target=get_ready, daemon=True)
        self._thread.start()

    def _returned(self) -> Members | None:
        """With the nodes that are back: they have answered twice."""
        before, self._answering = self._answering, {host.name for host in self._absent} - unreachable(self._absent)
        back = tuple(host for host in self._absent if host.name in before & self._answering)
        machines = (Path(self._launch.run_dir) / MACHINES).read_text(encoding="utf-8") if back else ""
        return Members((*self._hosts, *back), parse_machines(machines)) if back else None

    def _ready(self, members: Members) -> Members:
        """Its nodes, those of them that come made ready. Raises CannotGoOn, NodeError, ValueError."""
        there, wanted = [host.place for host in self._hosts], [host.place for host in members.hosts]
        if wanted[:1] != there[:1] or wanted == there:
            raise ValueError("it has another head, or the nodes that there are")
        refitted(self._launch, members.hosts, members.machines)
        if new := tuple(host for host in members.hosts if host.place not in there):
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
