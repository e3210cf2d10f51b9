"""The head's own watch for `hours_idle`: what counts as use, when machines go, and its calls by the head's role."""

import itertools
import re
import shlex
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.port import Ability
from inventory.errors import InventoryError
from inventory.localcloud.ecs import metadata, ram_roles
from inventory.localcloud.ecs.faults import FaultFile
from inventory.localcloud.ecs.role_keys import RoleKeys, role_api
from inventory.renting import idle, lease, tags
from inventory.settings import load_settings
from tests.support.memory_cloud import MemoryCloud
from tests.support.rented_in_memory import Rented
from tests.support.rented_on_paper import PaperCloud
from tests.test_localcloud_ecs_signature import PUBLISHED_V1
from training import reclaim
from training.laptop import idle_watch, rental
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import OpenCluster
from training.launch import Host, Launch
from training.node.idle import ecs, watch
from training.node.idle.ecs import Ecs, Machine, Refused, Releases, signed_query
from training.node.idle.watch import Use

HOUR, MINUTE = 3600.0, 60.0
CLUSTER = "spotune:cluster"


# What counts as use

OWN = frozenset({"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("", ""),
        ("spotune-spot-watch.service loaded active running Watch\nspotune-idle.service loaded active running x\n", ""),
        ("spotune-tiny-20260131-154500.service loaded active running x\n", "run tiny-20260131-154500"),
        ("unknown\n", "its runs are not known"),
        ("anna is logged in\n", "anna is logged in"),
        ("4711 python -m vllm serve /data/models/tiny\n", "4711 python -m vllm serve /data/models/tiny"),
        ("session 0 0 10.0.0.1:22 10.0.0.2:41000\n", ""),
        ("session 0 0 [::ffff:10.0.0.1]:22 [::ffff:10.0.0.2]:41000\n", ""),
        ("login 10.0.0.2:41000\n", ""),
        ("login 203.0.113.9:5\n", "ssh from 203.0.113.9, over by now"),
        ("login 203.0.113.9:5\nanna is logged in\n", "anna is logged in"),
        ("session 0 0 10.0.0.1:22 203.0.113.9:51234\n", "ssh from 203.0.113.9"),
        ("session 0 0 [2001:db8::1%eth0]:22 [2001:db8::9%eth0]:5\n", "ssh from 2001:db8::9"),
    ],
)
def test_what_a_node_printed_says_whether_something_uses_it(answer, said):
    assert watch.use(answer, OWN) == Use(said, is_now=bool(said) and "over by now" not in said)


def test_an_ssh_session_of_this_machine_is_seen_unless_it_is_of_the_nodes_own(monkeypatch):
    """A real connection over loopback, and the real ss."""
    monkeypatch.setattr(watch, "RUNS", "true")
    monkeypatch.setattr(watch, "USERS", "true")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert watch.users_of(["te1"], [], port) == Use()
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert watch.users_of(["te1"], [], port) == Use("te1: ssh from 127.0.0.1", is_now=True)
            assert watch.users_of(["te1"], ["127.0.0.1"], port) == Use()


@pytest.mark.parametrize("wrong", ["sleep 5", "exit 1"])
def test_a_head_that_cannot_answer_itself_may_have_a_run(monkeypatch, wrong):
    monkeypatch.setattr(watch, "NODE_S", 0.3)
    monkeypatch.setattr(watch, "RUNS", wrong)
    assert watch.users_of(["te1"], [], 22) == Use("te1: its users are not known", is_now=True)


def test_another_node_that_does_not_answer_is_used_by_nobody(monkeypatch):
    monkeypatch.setattr(watch, "RUNS", "true")
    monkeypatch.setattr(watch, "USERS", "true")
    assert watch.users_of(["te1", "te2.invalid"], [], 1) == Use()


# When machines go


@dataclass
class CloudOnPaper:
    """Two machines; `now` is its clock. `lost`: so many answers are lost after the call was done."""

    at: dict
    planned: dict = field(default_factory=dict)
    now: float = 1_800_000_000.0
    silent: bool = False
    lost: int = 0
    calls: list = field(default_factory=list)

    def releases(self):
        if self.silent:
            raise Refused("DescribeInstances does not answer: TimeoutError")
        machines = {k: Machine(at, self.planned.get(k), f"10.0.0.{k[2:]}") for k, at in self.at.items()}
        return Releases(machines, self.now)

    def release(self, instance_id, at):
        assert at >= self.now + 30 * MINUTE, "the cloud takes no time nearer than that"
        self.calls.append((instance_id, at))
        self.at[instance_id] = at
        if self.lost:
            self.lost -= 1
            raise Refused("ModifyInstanceAutoReleaseTime does not answer: TimeoutError")


class Clock:
    """A head, its users and the time that goes by for both it and the cloud."""

    def __init__(self, folder, hours_idle, planned_h=(10, 10), users=""):
        start = CloudOnPaper({}).now
        at = {f"i-{k}": start + hours * HOUR for k, hours in enumerate(planned_h, 1)}
        self.cloud = CloudOnPaper(at, dict(at))
        self.start, self.users, self.is_now, self.elapsed = start, users, True, 0.0
        told = lambda: Use(self.users, self.is_now and bool(self.users))  # noqa: E731
        self.watch = watch.Watch(hours_idle * HOUR, self.cloud, told, OWN, folder, lambda: self.elapsed)

    def minutes(self, count):
        for _ in range(count):
            self.elapsed += MINUTE
            self.cloud.now += MINUTE
            self.watch.step()
        return self

    def ends(self):
        """Hours from the beginning, of each machine."""
        return [(at - self.start) / HOUR for at in self.cloud.at.values()]


def test_idle_machines_go_when_hours_idle_is_over_and_runs_are_told(tmp_path, capsys):
    head = Clock(tmp_path, 2, users="te1: run tiny-1").minutes(60)
    assert head.cloud.calls == []
    head.users = ""
    head.minutes(80)
    assert head.cloud.calls == []
    head.minutes(30)
    assert head.ends() == pytest.approx([1 + 2 + 1 / 60] * 2, abs=0.02)
    assert len(head.cloud.calls) == 2, "each machine is asked for once"
    assert reclaim.read_release(tmp_path) == pytest.approx(head.start + head.ends()[0] * HOUR, abs=1)
    assert "nothing uses the machines: they are released at" in capsys.readouterr().out


def test_the_cloud_wants_its_half_hour_though_hours_idle_is_shorter(tmp_path):
    head = Clock(tmp_path, 0.1).minutes(1)
    assert head.ends() == pytest.approx([(1 + 35) / 60] * 2, abs=0.02)


def test_who_comes_before_gets_the_planned_time_back_and_leaving_starts_anew(tmp_path, capsys):
    head = Clock(tmp_path, 1, planned_h=(10, 8)).minutes(40)
    assert max(head.ends()) < 1.1
    head.users = "te2: ssh from 203.0.113.9"
    head.minutes(2)
    assert head.ends() == [10, 8] and len(head.cloud.calls) == 4
    assert reclaim.read_release(tmp_path) == head.start + 8 * HOUR
    assert "te2: ssh from 203.0.113.9: the machines stay as planned" in capsys.readouterr().out
    head.users = ""
    head.minutes(40)
    assert max(head.ends()) < 42 / 60 + 1.1 and head.watch.sooner.keys() == {"i-1", "i-2"}


def test_somebody_who_comes_and_goes_keeps_the_machines(tmp_path):
    head = Clock(tmp_path, 1)
    for _ in range(10):
        head.users = ""
        head.minutes(20)
        head.users = "te1: ssh from 203.0.113.9"
        head.minutes(1)
    assert head.cloud.calls == []


def test_machines_that_go_sooner_anyway_or_never_are_left_alone(tmp_path):
    head = Clock(tmp_path, 3, planned_h=(1, 3.5))
    head.cloud.at["i-3"] = None
    head.minutes(240)
    assert head.cloud.calls == []


def test_a_time_that_was_moved_further_meanwhile_is_not_shortened_by_moving_back(tmp_path):
    head = Clock(tmp_path, 1).minutes(30)
    head.cloud.at = dict.fromkeys(head.cloud.at, head.start + 20 * HOUR)
    head.users = "te1: run tiny-2"
    head.minutes(1)
    assert head.ends() == [20, 20]


def test_a_time_that_somebody_moved_while_nobody_was_seen_is_a_use(tmp_path, capsys):
    """`fab up --hours 20` asks the cloud alone; a command of half a minute falls between two looks."""
    head = Clock(tmp_path, 2).minutes(90)
    assert max(head.ends()) < 2.1
    head.cloud.at = dict.fromkeys(head.cloud.at, head.start + 20 * HOUR)
    head.cloud.planned = dict(head.cloud.at)
    head.minutes(60)
    assert head.ends() == [20, 20] and "somebody moved the release time" in capsys.readouterr().out
    head.minutes(40)
    assert head.ends() == pytest.approx([1.5 + 2] * 2, abs=0.05)


def test_machines_that_are_not_asked_or_have_no_plan_are_left_alone(tmp_path):
    """`fab up` made one after the start: nobody asks it who uses it."""
    head = Clock(tmp_path, 1, planned_h=(10, 10, 10))
    del head.cloud.planned["i-2"]
    head.minutes(60)
    assert head.ends()[0] < 1.1 and head.ends()[1:] == [10, 10]


def test_what_the_laptop_brought_forward_is_given_back_to_who_is_there(tmp_path):
    """Somebody with a plain `ssh`, which the laptop's own question does not see."""
    head = Clock(tmp_path, 1, users="te1: ssh from 203.0.113.9").minutes(30)
    assert head.cloud.calls == []
    head.cloud.at = dict.fromkeys(head.cloud.at, head.cloud.now + HOUR)
    assert head.minutes(6).ends() == [10, 10]


def test_a_visit_that_is_over_starts_the_hours_anew_and_leaves_the_laptops_end(tmp_path):
    head = Clock(tmp_path, 2).minutes(60)
    head.cloud.at = dict.fromkeys(head.cloud.at, head.cloud.now + 2 * HOUR)
    head.users, head.is_now = "te1: ssh from 203.0.113.9, over by now", False
    head.minutes(1)
    head.users = ""
    head.minutes(100)
    assert head.cloud.calls == [] and head.ends() == [3, 3]


def test_a_visit_to_machines_that_go_soon_gives_them_back(tmp_path):
    head = Clock(tmp_path, 1).minutes(40)
    head.users, head.is_now = "te1: ssh from 203.0.113.9, over by now", False
    assert head.minutes(1).ends() == [10, 10]


def test_an_answer_that_is_lost_loses_no_planned_time(tmp_path):
    head = Clock(tmp_path, 1)
    head.cloud.lost = 1
    head.minutes(40)
    assert max(head.ends()) < 1.1 and reclaim.read_release(tmp_path) == pytest.approx(
        min(head.cloud.at.values()), abs=1
    )
    head.users, head.cloud.lost = "te1: run tiny-2", 1
    head.minutes(1)
    head.users = ""
    head.minutes(1)
    head.users = "te1: run tiny-3"
    assert head.minutes(6).ends() == [10, 10]


def test_what_is_given_back_never_goes_beyond_the_plan_that_the_budget_left(tmp_path):
    head = Clock(tmp_path, 1).minutes(40)
    head.cloud.planned = dict.fromkeys(head.cloud.at, head.start + 5 * HOUR)  # by the laptop's move_back
    head.users = "te1: ssh from 203.0.113.9"
    assert head.minutes(1).ends() == [5, 5]


def test_a_login_that_is_over_already_is_read_out_of_the_journal(tmp_path):
    """With what sshd writes; journalctl itself is asked on real hosts (test_localcloud_ecs_hosts.py)."""
    told = "Accepted publickey for root from 203.0.113.9 port 51234 ssh2: ED25519 SHA256:abc\n"
    told += "Accepted publickey for root from 2001:db8::9 port 5 ssh2: RSA SHA256:abc\n"
    there = tmp_path / "journalctl"
    there.write_text(f"#!/bin/sh\ncat <<'END'\n{told}END\n")
    there.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    answer = subprocess.run(["sh", "-c", watch.LOGINS], env=env, capture_output=True, text=True, check=True).stdout
    assert watch.use(answer, frozenset({"2001:db8::9"})) == Use("ssh from 203.0.113.9, over by now")
    assert watch.use(answer, frozenset({"203.0.113.9"})) == Use("ssh from 2001:db8::9, over by now")
    assert watch.use(answer, frozenset({"203.0.113.9", "2001:db8::9"})) == Use()


def test_a_cloud_that_does_not_answer_is_said_once_and_asked_again(tmp_path, capsys):
    head = Clock(tmp_path, 0.6)
    head.cloud.silent = True
    head.minutes(10)
    said = capsys.readouterr().out
    assert said == "the machines go as planned: DescribeInstances does not answer: TimeoutError\n"
    head.cloud.silent = False
    assert max(head.minutes(1).ends()) < 1


# Its calls, by the role of the machine


def test_the_signature_is_the_vendors_own_example():
    parameters = {name: value for name, value in PUBLISHED_V1.items() if name != "Signature"}
    query = parse_qs(signed_query(parameters, "testsecret"), strict_parsing=True)
    assert query == {name: [value] for name, value in PUBLISHED_V1.items()}


@pytest.fixture
def head(tmp_path):
    """A machine of the local cloud's API, which asks metadata and API over HTTP on loopback; no host behind it."""
    paper = PaperCloud(tmp_path)
    (instance_id,) = paper.run(SpotStrategy="SpotAsPriceGo", Tag__1__Key=CLUSTER, Tag__1__Value="demo")
    paper.cloud.account.instances[instance_id].address = "127.0.0.1"
    keys = RoleKeys()
    service = metadata.Service(paper.cloud, keys, role_api(paper.cloud, keys, FaultFile(tmp_path / "faults.json")))
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    service.listen(sock)
    at = f"127.0.0.1:{sock.getsockname()[1]}"
    yield SimpleNamespace(
        paper=paper,
        keys=keys,
        instance=paper.cloud.account.instances[instance_id],
        ecs=Ecs(f"http://{at}", "cn-hangzhou", ram_roles.ROLE, at, (CLUSTER, "demo")),
        attach=lambda **more: paper.call(
            "AttachInstanceRamRole", InstanceIds=f'["{instance_id}"]', RamRoleName=ram_roles.ROLE, **more
        ),
    )
    service.stop()


def test_the_head_reads_and_moves_its_release_time(head):
    head.attach()
    one = head.instance.instance_id
    assert head.ecs.releases().machines == {one: Machine(None, None, "127.0.0.1")}
    at = head.paper.cloud.now() // 60 * 60 + 2 * HOUR
    head.ecs.release(head.instance.instance_id, at)
    found = head.ecs.releases()
    assert found.machines[one].at == at and abs(found.now - head.paper.cloud.now()) < 5
    head.paper.hurry(HOUR)
    assert abs(head.ecs.releases().now - found.now - HOUR) < 5, "the time is the cloud's"


def test_other_clusters_machines_are_not_seen(head):
    head.attach()
    head.paper.run(SpotStrategy="SpotAsPriceGo", Tag__1__Key=CLUSTER, Tag__1__Value="other")
    assert list(head.ecs.releases().machines) == [head.instance.instance_id]


def test_without_a_role_there_are_no_credentials(head):
    with pytest.raises(Refused, match="the metadata service: HTTP 404"):
        head.ecs.releases()


def test_a_role_may_do_nothing_else_and_no_more_than_it_was_narrowed_to(head):
    head.attach(Policy='{"Version":"1","Statement":[{"Effect":"Allow","Action":"ecs:DescribeInstances"}]}')
    assert head.ecs.releases().machines
    with pytest.raises(Refused, match=r"ModifyInstanceAutoReleaseTime: Forbidden\.RAM"):
        head.ecs.release(head.instance.instance_id, head.paper.cloud.now() + HOUR)
    with pytest.raises(Refused, match=r"DeleteInstances: Forbidden\.RAM"):
        head.ecs._call("DeleteInstances", {"InstanceId.1": head.instance.instance_id, "Force": "true"})
    assert head.instance.instance_id in head.paper.cloud.account.instances


def test_a_key_of_the_role_without_its_token_is_refused_and_none_is_in_the_sentence(head, monkeypatch):
    head.attach()
    key_id, secret, _ = head.ecs._credentials()
    monkeypatch.setattr(Ecs, "_credentials", lambda self: (key_id, secret, "guessed"))
    with pytest.raises(Refused, match=r"InvalidSecurityToken\.Malformed") as refused:
        head.ecs.releases()
    assert not {key_id, secret, "guessed"} & set(re.split(r"\W", str(refused.value)))


def test_a_release_time_that_the_api_refuses_is_said_by_its_code(head):
    head.attach()
    with pytest.raises(Refused, match=r"InvalidAutoReleaseTime\.Malformed"):
        head.ecs.release(head.instance.instance_id, head.paper.cloud.now() + MINUTE)


@pytest.mark.parametrize("answer", ["no JSON", "[]", '{"Instances": 3}', '{"Instances": {"Instance": [{"a": 1}]}}'])
def test_an_answer_that_cannot_be_read_is_no_traceback(head, monkeypatch, answer):
    monkeypatch.setattr(Ecs, "_credentials", lambda self: ("a", "b", "c"))
    monkeypatch.setattr(ecs, "_asked", lambda *_: (answer, ""))
    with pytest.raises(Refused, match="DescribeInstances"):
        head.ecs.releases()


def test_nothing_that_answers_nothing_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(Refused, match="the metadata service does not answer: ConnectionRefusedError"):
        Ecs(f"http://{at}", "cn-hangzhou", "r", at, ("k", "v")).releases()


def test_the_program_says_what_it_wants():
    done = subprocess.run([sys.executable, "-m", "training.node.idle.watch"], capture_output=True, text=True)
    assert done.returncode == 2 and "--hours-idle" in done.stderr


# The laptop's part


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    cloud = MemoryCloud()
    for module in (idle_watch, rental, lease):
        monkeypatch.setattr(module, "open_cloud", lambda settings: cloud)
    monkeypatch.setattr(lease, "kept", lambda *_: nullcontext())

    def rented(**table):
        cluster = Rented(tmp_path, cloud, **table)
        cluster.up(2, hours=4)
        return cluster

    return rented


class Head(HereHead):
    """One that keeps what it is told to run."""

    def __init__(self, folder):
        super().__init__(folder)
        self.told = []

    def shell(self, command, **given):
        self.told.append(command)
        return "active\n" if "is-active" in command else ""


def cluster_of(rented, tmp_path):
    nodes = tuple(SimpleNamespace(name=f"te{k}", private_address=f"10.0.0.{k}", port=22) for k in (1, 2))
    return OpenCluster(Head(tmp_path / "runs"), nodes, rented.settings)


LAUNCH = Launch("tiny-1", "/data/runs/tiny-1", (Host("te1", "10.0.0.1", 1),), "m", (), "/opt/env/bin/python", {})


def test_a_start_gives_the_head_its_role_and_starts_the_watch_anew(rented, tmp_path):
    paid = rented(hours_idle=1.5, idle_role="spotune-idle")
    cluster = cluster_of(paid, tmp_path)
    idle_watch.start(cluster, LAUNCH)
    machines = paid.cloud.instances()
    assert set(paid.cloud.roles.values()) == {"spotune-idle"} and len(paid.cloud.roles) == 1, "the head alone"
    assert all(tags.moment_of(each.tags, tags.PLANNED_TAG) for each in machines)
    (command,) = cluster.head.told
    assert command.startswith("systemctl stop spotune-idle 2>/dev/null; systemd-run --unit=spotune-idle ")
    words = shlex.split(command)
    asked = dict(itertools.pairwise(words))
    assert asked["--hours-idle"] == "1.5" and asked["--role"] == "spotune-idle"
    assert asked["--tag-key"] == CLUSTER and asked["--tag-value"] == paid.settings.name
    assert words[words.index("--nodes") + 1 : words.index("--own")] == ["te1", "te2"]


def test_what_the_head_moved_the_next_command_moves_back(rented, tmp_path):
    paid = rented(hours_idle=1, idle_role="spotune-idle")
    idle_watch.start(cluster_of(paid, tmp_path), LAUNCH)
    planned = {each.instance_id: each.release_at for each in paid.cloud.instances()}
    soon = datetime.fromtimestamp(datetime.now(UTC).timestamp() + 40 * MINUTE, UTC)
    for each in planned:
        paid.cloud.set_release_time(each, soon)  # as the head does
    assert idle.move_back(paid.cloud, paid.settings)
    assert all(abs(each.release_at - planned[each.instance_id]) < lease.SAME for each in paid.cloud.instances())


def test_what_a_start_noted_does_not_undo_a_later_extension(rented, tmp_path):
    paid = rented(hours_idle=1, idle_role="spotune-idle")
    idle_watch.start(cluster_of(paid, tmp_path), LAUNCH)
    lease.extend(paid.cloud, paid.settings, timedelta(hours=9), print)
    for each in paid.cloud.instances():
        paid.cloud.set_release_time(each.instance_id, datetime.now(UTC) + timedelta(minutes=40))  # as the head does
    moved = idle.move_back(paid.cloud, paid.settings)
    assert moved and abs(moved - datetime.now(UTC) - timedelta(hours=9)) < lease.SAME


@pytest.mark.parametrize("table", [{}, {"hours_idle": 1}, {"idle_role": "spotune-idle"}])
def test_nothing_watches_where_it_was_not_asked_for(rented, tmp_path, capsys, table):
    paid = rented(**table)
    cluster = cluster_of(paid, tmp_path)
    idle_watch.start(cluster, LAUNCH)
    idle_watch.start(OpenCluster(cluster.head), LAUNCH)
    assert cluster.head.told == [] and paid.cloud.roles == {} and capsys.readouterr().out == ""


def test_the_plan_in_the_tags_is_what_the_head_reads(head):
    head.attach()
    at = head.paper.cloud.now() // 60 * 60 + 3 * HOUR
    one = head.instance.instance_id
    tag = tags.moment(datetime.fromtimestamp(at, UTC))
    told = {"ResourceType": "instance", "ResourceId__1": one, "Tag__1__Key": tags.PLANNED_TAG}
    head.paper.call("TagResources", **told, Tag__1__Value=tag)
    assert head.ecs.releases().machines[one].planned == at
    head.paper.call("TagResources", **told, Tag__1__Value="soon")
    assert head.ecs.releases().machines[one].planned is None
    assert ecs.PLANNED == tags.PLANNED_TAG


def test_a_watch_that_does_not_run_is_not_promised(rented, tmp_path, capsys, monkeypatch):
    paid = rented(hours_idle=1, idle_role="spotune-idle")
    monkeypatch.setattr(Head, "shell", lambda self, command, **given: "inactive\n")
    rental.say_until(cluster_of(paid, tmp_path))
    assert "spotune-idle does not run on" in capsys.readouterr().out


def test_a_start_ends_the_watch_of_an_earlier_one_whatever_is_set_by_now(rented, tmp_path):
    cluster = cluster_of(rented(), tmp_path)
    rental.extend(cluster, 60)
    assert cluster.head.told[0] == "systemctl stop spotune-idle 2>/dev/null; true"


def test_a_plan_that_the_budget_cuts_is_cut_in_the_tags_too(rented, tmp_path):
    paid = rented(hours_idle=1, idle_role="spotune-idle")
    idle_watch.start(cluster_of(paid, tmp_path), LAUNCH)
    (machine, *_) = paid.cloud.instances()
    lease.note_plan(paid.cloud, machine, machine.release_at - timedelta(hours=2))
    (machine, *_) = paid.cloud.instances()
    assert machine.release_at - tags.moment_of(machine.tags, tags.PLANNED_TAG) >= timedelta(hours=1.9)


def test_a_role_that_cannot_be_given_is_said_and_ends_no_start(rented, tmp_path, capsys, monkeypatch):
    paid = rented(hours_idle=1, idle_role="spotune-idle")

    def refused(*_):
        raise CloudError("the role spotune-idle is not there", Kind.INPUT)

    monkeypatch.setattr(paid.cloud, "give_role", refused)
    idle_watch.start(cluster_of(paid, tmp_path), LAUNCH)
    monkeypatch.setattr(paid.cloud, "abilities", frozenset(Ability) - {Ability.ROLES})
    idle_watch.start(cluster_of(paid, tmp_path), LAUNCH)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "hours_idle waits for the next command of this laptop: the role spotune-idle is not there"
    assert len(said) == 2 and said[1].startswith("hours_idle waits for the next command of this laptop: this cloud")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, ""),
        ({"hours_idle": 1}, "memory.idle_role in cluster.toml names a role"),
        ({"hours_idle": 1, "idle_role": "spotune-idle"}, "has used them for 1 h, the head lets them go sooner"),
        ({"hours_idle": 0.1, "idle_role": "r"}, "for 35 min (the least that the cloud takes), the head lets them go"),
    ],
)
def test_who_leaves_a_run_alone_is_told_what_comes_after_it(rented, tmp_path, capsys, table, said):
    rental.say_until(cluster_of(rented(**table), tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + bool(said) and said in lines[-1]


def test_a_role_is_a_name(tmp_path):
    with pytest.raises(InventoryError, match=r"(?s)aliyun\.idle_role.*a role's name is expected"):
        load_settings(_written(tmp_path, "acs:ram::1:role/x"))


def _written(folder, role):
    path = folder / "cluster.toml"
    path.write_text(f'provider = "aliyun"\n[aliyun]\nendpoint = "local"\nidle_role = "{role}"\n', encoding="utf-8")
    return path
