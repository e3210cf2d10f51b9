"""Rented machines stay for as long as a run needs them, and the head is told until when: a run saves before that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial

from inventory.cloud.opening import open_cloud
from inventory.errors import InventoryError
from inventory.renting import lease, report
from inventory.shown import clock
from training.laptop import head_node, runs
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.run.notices import FOLDER, RELEASE, release_text

_MODEL = "'[/]data/models/'"
_QUESTIONS = f"'{head_node.PACKAGE.replace('.', '[.]')}'"
_SESSIONS = """ps -eo pid=,ppid=,cgroup:200=,comm= | awk -v own=$$ -v asked="$(echo $(pgrep -f QUESTIONS))" '
    { pid = $1; parent[pid] = $2; group[pid] = $3; $1 = $2 = $3 = ""; name[pid] = substr($0, 4) }
    END {
        for (pid = own; pid > 1; pid = parent[pid]) mine[pid] = 1
        for (n = split(asked, pids, " "); n > 0; n--) mine[pids[n]] = 1
        for (pid in name) {
            left = group[pid] ~ /session-[^\\/]*\\.scope/ && group[pid] != group[own]
            if (!mine[pid] && name[pid] !~ /^sshd/ && (name[parent[pid]] ~ /^sshd/ || left))
                print name[pid] " (" pid ") was started over ssh"
        }
    }'""".replace("QUESTIONS", _QUESTIONS)
USERS = f"{_SESSIONS}; pgrep -f {_MODEL} >/dev/null && sleep 3; pgrep -af {_MODEL}; true"
"""Prints what runs on a node for somebody who came by ssh, with or without a terminal, also what was left there by tmux
or nohup, but for what answers questions about runs; and which programs have a base model loaded, those apart that are
just ending. Its own words do not match."""


def print_other_billing(cluster: Session) -> None:
    """What is billed beside these machines: a line each."""
    for line in report.elsewhere_lines(cluster.settings) if cluster.settings else ():
        print(line, flush=True)


def extend_for_plan(cluster: Session, seconds: float) -> None:
    """Before a run starts: its machines live for what it is expected to take; 0: nobody knows. Raises CloudError,
    RentError, HeadError."""
    lease.restore(cluster.settings)
    if cluster.settings and cluster.extends_rental:
        lease.cover(cluster.settings, seconds, print, partial(tell_release, cluster.head), cluster.confirm)


@contextmanager
def lease_extended(cluster: Session) -> Iterator[None]:
    """Inside, the cloud does not release rented machines at their planned end; afterwards they are idle."""
    if not cluster.settings:
        yield
        return
    if lease.hours_idle(cluster.settings):
        later = lease.idle_text(cluster.settings)
        print(f"when nothing uses the machines any more, they are released {later} later (hours_idle)", flush=True)
    own = RemoteHead(cluster.nodes[0])  # over a connection of its own: for another thread
    try:
        with closing(own), lease.keep_machines(cluster.settings, print, partial(tell_release, own), cluster.send):
            yield
    finally:
        shorten_idle_lease(cluster)


def shorten_idle_lease(cluster: Session) -> None:
    """Bring the release time forward where `hours_idle` says so and nothing uses the machines."""
    if not (cluster.settings and lease.hours_idle(cluster.settings)):
        return
    try:
        if runs.running_or_starting(cluster.head):
            return
        if users := users_of(cluster):
            print(f"the machines stay as planned: {users}")
            return
        before, end = lease.bring_forward(open_cloud(cluster.settings), cluster.settings)
    except (InventoryError, HeadError) as error:
        print(f"the machines stay as planned: {error}")
        return
    if before and end and end < before:
        print(
            f"nothing uses the machines: the cloud releases them at {clock(end)} instead of {clock(before)} "
            "(hours_idle); the next command that uses them moves that back"
        )


def users_of(cluster: Session) -> str:
    """Who is logged in, or has a model loaded, on which node; empty where nobody."""
    answers = cluster.ask_all(USERS)
    silent = {name: f"is not known ({answer})" for name, answer in answers.items() if isinstance(answer, Exception)}
    users = {name: lines[0][:100] for name, answer in answers.items() if (lines := str(answer).strip().splitlines())}
    return "; ".join(f"{name}: {what}" for name, what in (users | silent).items())


@contextmanager
def in_use(cluster: Session) -> Iterator[None]:
    """Inside, a command uses the machines; afterwards they are idle."""
    lease.restore(cluster.settings)
    try:
        yield
    finally:
        shorten_idle_lease(cluster)


def print_release_time(cluster: Session, *, goes_on: bool = True) -> None:
    """Last words where a run goes on that nobody follows, or none does: until when the machines are there."""
    if not (cluster.settings and cluster.settings.is_rented):
        return
    try:
        end = lease.released_at(open_cloud(cluster.settings), cluster.settings)
    except InventoryError as error:
        print(f"until when the machines are there is not known ({error}): fab status")
        return
    if end and not goes_on:
        print(f"The cloud releases the machines at {clock(end)}; sooner: fab down")
    elif end:
        print(
            f"The cloud releases the machines at {clock(end)}; while no one follows the run, nothing extends "
            "that, and it saves and exits before. To keep them longer: fab logs --follow, or fab up --hours N"
        )
        if lease.hours_idle(cluster.settings):
            print("hours_idle waits for the next command of this laptop")
    else:
        print("The machines cost until fab down")


def tell_release(head: Head, at: datetime) -> None:
    """Write the release time where a run's supervisor looks for it. Raises HeadError."""
    head.ask(fs.write, FOLDER / RELEASE, f"{release_text(at.timestamp())}\n")
