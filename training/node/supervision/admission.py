"""Nodes that are to take part in a run that goes on: asked for by MEMBERS in its folder, or lost before and back. They
are looked at beforehand, so that no run stops for a node that is not fit."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from training.node.supervision.launcher import import_ahead
from training.node.supervision.nodes import NodeError, make_ready, on_hosts, ship_all, ssh, unreachable
from training.node.supervision.regroup import CannotGoOn, refitted, with_earlier
from training.plan.refit import Members, parse_machines, parse_members
from training.recipe.reading import read_recipe
from training.run.folder import MACHINES, MEMBERS, RECIPE
from training.run.launch import Host, Launch
from training.run.notices import read_notices
from training.text.files import ORIGIN

MODEL_S = 20.0
LOOK_S = 5.0


class Admission:
    """For the nodes that a run has now."""

    members: Members | None = None
    """The nodes that the run is to go on with, once those that come are ready."""

    def __init__(self, launch: Launch, hosts: tuple[Host, ...], absent: Mapping[Host, float], notices: Path) -> None:
        """`launch`: of its last ranks; `hosts`: the nodes there are; `absent`: those that it lost, and how many seconds
        they must have answered to take part again; `notices`: the folder where nodes leave the cloud's."""
        self._launch, self._hosts, self._absent, self._notices = launch, hosts, absent, notices
        self._run = Path(launch.run_dir)
        self._text = self._said = ""
        self._answering = dict[Host, float]()
        """Since when, by the monotonic clock."""
        self._look_at = 0.0
        self._thread: threading.Thread | None = None
        self._answer: Members | Exception | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether nodes are being looked at."""
        return self._thread is not None

    def close(self) -> None:
        """No more nodes are wanted."""
        self._closed = True

    def look(self) -> Members | None:
        """Look once; `members` once they are ready. Raises CannotGoOn where they will not be; of a node that is back,
        once."""
        if not self._thread:
            self._begin()
        if not self._thread or self._thread.is_alive():
            return None
        asked, self._text = self._text, ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if asked and self._file.read_text(encoding="utf-8") == asked:  # else more was asked for meanwhile
                self._file.unlink()
        answer, self._answer, self._thread = self._answer, None, None
        self._look_at = time.monotonic() + LOOK_S
        if not isinstance(answer, Exception):
            self.members = answer
            return answer
        said = f"{MEMBERS}: {answer}" if asked else str(answer)
        if isinstance(answer, NodeError):
            said = f"{answer.node} is not ready: {answer}"
        if asked or said != self._said:
            self._said = said
            raise CannotGoOn(said) from answer
        return None

    @property
    def _file(self) -> Path:
        return self._run / MEMBERS

    def _begin(self) -> None:
        """Let a thread look, where there is something to look at."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self._text = self._file.read_text(encoding="utf-8")
        if not self._text and (not self._absent or time.monotonic() < self._look_at):
            return

        def look() -> None:
            try:
                self._answer = self._asked() if self._text else self._returned()
            except Exception as error:  # whatever it is, the run goes on as it is
                self._answer = error

        self._thread = threading.Thread(target=look, daemon=True)
        self._thread.start()

    def _asked(self) -> Members:
        """Those of the file, made ready. Raises CannotGoOn, NodeError, ValueError."""
        members = parse_members(self._text)
        there, wanted = [host.place for host in self._hosts], [host.place for host in members.hosts]
        if wanted[:1] != there[:1] or wanted == there:
            raise ValueError("it has another head, or the nodes that there are")
        new = tuple(host for host in members.hosts if host.place not in there)
        if leaving := self._leaving() & {host.name for host in new}:
            raise ValueError(f"{', '.join(sorted(leaving))} is being reclaimed")
        members = replace(members, machines=with_earlier(self._run, members.machines))
        refitted(self._launch, members.hosts, members.machines)
        if errors := self._make_ready(new):
            raise errors[0]
        return members

    def _returned(self) -> Members | None:
        """With the nodes that are back, those of them that are fit. Raises CannotGoOn, NodeError, ValueError."""
        machines = parse_machines((self._run / MACHINES).read_text(encoding="utf-8"))
        out = unreachable(tuple(self._absent)) | self._leaving()
        now, known = time.monotonic(), {node.name for node in machines.nodes}
        answering = [host for host in self._absent if host.name in known - out]
        self._answering = {host: self._answering.get(host, now) for host in answering}
        back = tuple(host for host, since in self._answering.items() if now - since >= self._absent[host])
        if not back:
            return None
        refitted(self._launch, (*self._hosts, *back), machines)
        errors = self._make_ready(back)
        unfit = {error.node for error in errors}
        if not (fit := tuple(host for host in back if host.name not in unfit)):
            raise errors[0]
        if unfit:
            refitted(self._launch, (*self._hosts, *fit), machines)
        return Members((*self._hosts, *fit), machines)

    def _leaving(self) -> set[str]:
        """Nodes that the cloud takes back."""
        return {notice.node for notice in read_notices(self._notices) if notice.at > time.time()}

    def _make_ready(self, new: tuple[Host, ...]) -> list[NodeError]:
        recipe = read_recipe(self._run / RECIPE)
        model = Path(self._launch.models) / recipe.model_dir / ORIGIN

        def make_ready_and_ship(host: Host) -> None:
            launch = replace(self._launch, hosts=(self._launch.hosts[0], host))
            _must_have_model(model, host)
            if self._closed:
                raise NodeError(host.name, "it is not wanted any more")
            make_ready(launch, (host,))
            ship_all(launch, (host,))
            import_ahead(launch, host)

        return on_hosts(new, make_ready_and_ship)


def _must_have_model(folder: Path, host: Host) -> None:
    """NodeError where a node has not the base model that the head has."""
    files = [folder / ORIGIN, folder / "config.json"]
    own = "".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    if ssh(host.name, f"cat {shlex.join(map(str, files))} 2>/dev/null; true", MODEL_S) != own:
        raise NodeError(host.name, f"it has not {folder} as the head has; the base deploy brings it there")
