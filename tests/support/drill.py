"""The fault drill: every call a command makes, each fault at each of them, and what came of it."""

from collections import Counter

import inventory.renting.tasks as renting
import snapshots.tasks as keeping
from inventory.localcloud.ecs.account import Account
from inventory.localcloud.ecs.lifecycle import reclaim
from tests.support import drill_checks as checks
from tests.support.drill_plan import DEARER, HEADLESS, KINDS, NOT_APPLICABLE, PINNED, Call, Cell
from tests.support.drill_range import Range, State

CLUSTER, NODES = "drill", 2


class Drill(Range):
    """The range, with the states that commands begin in."""

    def __enter__(self):
        super().__enter__()
        self._calls, self._cells = {}, {}
        self.fab(renting.up, yes=True)
        self.fab(renting.down, yes=True, disks=True, force=True)
        key = self.places.own_key
        own = {path: path.read_bytes() for path in (key, key.with_name(f"{key.name}.pub"))}
        fresh = Account(region_id=self.world.region_id, port=self.world.port)
        self.states = {"empty": State(fresh.model_dump_json(), own)}
        self.go_back(self.states["empty"])
        self.must(renting.up, yes=True)
        self.states["up"] = self.state()
        self.must(keeping.create)
        self.must(renting.down, yes=True, force=True)
        self.hurry(60)
        self.states["kept"] = self.state()
        return self

    def must(self, task, **flags):
        ended = self.fab(task, **flags)
        assert ended.code == 0, ended.output + ended.sentence

    def begin(self, command):
        self.set_disk_gib(command.disk_gib)
        self.go_back(self.states[command.begins])

    def run(self, command):
        return self.fab(command.task, **dict(command.flags))

    def calls_of(self, command):
        """The calls of an undisturbed run."""
        if command not in self._calls:
            self._calls[command] = self._recorded(command)
        return self._calls[command]

    def column(self, command, kind):
        """The cells of one fault, a call each."""
        if (command, kind) not in self._cells:
            self._cells[command, kind] = tuple(self._cell(command, call, kind) for call in self.calls_of(command))
        return self._cells[command, kind]

    def all_cells(self, command):
        return [cell for kind in KINDS for cell in self.column(command, kind)]

    def _recorded(self, command):
        self.begin(command)
        ended = self.run(command)
        assert ended.code == 0, ended.output + ended.sentence
        assert not (wrong := list(self.wrong(command))), wrong
        seen, calls = Counter(), []
        for number, action in enumerate(self.actions):
            seen[action] += 1
            calls.append(Call(action, seen[action], number))
        at = [n for n, action in enumerate(self.actions) if action == command.since]
        return tuple(calls[at[0] if at else 0 :])

    def wrong(self, command, said=""):
        """What is not as it should be after the command has ended well."""
        if command.ends == "cluster":
            return checks.unlike_a_cluster(self.world, CLUSTER, NODES, self.places, said)
        if command.ends == "nothing":
            return checks.left_over(self.world, CLUSTER, self.places)
        return checks.half_open(self.places)

    def _cell(self, command, call, kind):
        """Do it: the command with the fault, then the command again."""
        if not kind.happens_to(call.action):
            return Cell(call, kind, NOT_APPLICABLE)
        self.begin(command)
        struck = self._arm(command, call, kind)
        first = self.run(command)
        if not struck():
            return Cell(call, kind, NOT_APPLICABLE)
        self.api.faults.clear()
        self.api.before = lambda number, action: None
        problems = [f"first: {line}" for line in self._problems(command, kind, first, first.output)]
        if not first.code and (kind.kind or command.task is renting.up) and not kind.notice_s:
            problems += [f"first: {line}" for line in self.wrong(command, first.output)]
        if kind.notice_s:
            self.hurry(kind.notice_s + 1)
        second = self.run(command)
        if second.code and HEADLESS in second.sentence:  # a head that has its disk again is what it asks for
            self.must(renting.up, yes=True)
            second = self.run(command)
        problems += [f"then: {line}" for line in self._problems(command, kind, second, first.output + second.output)]
        if second.code:
            problems.append(f"then: exit {second.code}: {second.sentence}")
        else:
            problems += [f"then: {line}" for line in self.wrong(command, first.output + second.output)]
        return Cell(call, kind, word(kind, first), first.sentence, tuple(problems))

    def _arm(self, command, call, kind):
        """Set the fault; a function that tells whether it struck."""
        if kind.kind:
            self.api.fault(call.action, kind.kind, kind.times, call.nth - 1, **dict(kind.more))
            return lambda: self.actions.count(call.action) >= call.nth
        gone = []

        def reclaim_one(number, action):
            running = [i for i in self.world.instances.values() if i.status == "Running"]
            if number == call.number and running:
                # Of a snapshot only the head matters; else one in turn.
                victim = sorted(running, key=lambda i: i.name)[
                    0 if command.ends == "snapshot" else number % len(running)
                ]
                gone.append(victim.name)
                reclaim(self.api.cloud, victim.instance_id, kind.notice_s)
                self.settle()

        self.api.before = reclaim_one
        return lambda: bool(gone)

    def _problems(self, command, kind, ended, said):
        """What a single run must not do, whatever the fault."""
        yield from checks.leaks(self.world, CLUSTER, NODES, said)
        if self.ssh.frozen:
            yield f"/data is still frozen on {', '.join(self.ssh.frozen)}"
        begun = [s for s in self.world.snapshots.values() if s.snapshot_id not in self.states["kept"].world]
        yield from (f"{s.snapshot_id} was begun, which nobody said" for s in begun if s.snapshot_id not in said)
        if "Traceback" in ended.output or ended.code not in (0, 1, 2):
            yield f"exit {ended.code}: {ended.output[-500:]}"
        if ended.code and (not ended.sentence.strip() or "\n" in ended.sentence.strip()):
            yield f"exit {ended.code} with {ended.sentence!r}"
        if ended.code and kind.words and not any(words in ended.sentence for words in kind.words):
            yield f"after {kind.name} it says {ended.sentence!r}"
        if ended.code and kind.kind == "no-stock" and self.world.instances:
            yield f"{len(self.world.instances)} machines of a cluster that could not be had whole"
        if ended.code and kind.times == 1 and kind.kind and not any(w in ended.sentence for w in (PINNED, DEARER)):
            yield f"one {kind.name} and it gave up: {ended.sentence}"


def word(kind, first):
    """What the first, disturbed run did, in a word for the table."""
    if first.code:
        return f"exit {first.code}"
    if kind.kind == "no-stock":
        return "next zone"
    return "asked again" if kind.kind in ("throttle", "error-500", "time-out", "lost-answer", "busy") else "goes on"
