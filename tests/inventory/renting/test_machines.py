"""A machine that goes while something is done with it is the error, whatever it looked like first."""

import base64
import subprocess
from types import SimpleNamespace

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.renting import access, machines
from inventory.renting.machines import naming_gone
from inventory.ssh import SshError
from tests.snapshots.test_rebuild import machine
from tests.support.paper_cluster import PaperCluster
from tests.support.ssh_server import SshServer

BOTH = tuple(machine(k) for k in (1, 2))


def cloud(*there, refuses=False):
    def instances(ids):
        if refuses:
            raise CloudError("no answer", Kind.PASSING)
        return tuple(each for each in there if each.instance_id in ids)

    return SimpleNamespace(instances=instances)


@pytest.mark.parametrize("error", [SshError("te2: timed out"), CloudError("there is no such thing", Kind.NOT_FOUND)])
def test_an_error_about_a_machine_that_is_gone_says_that_it_is_gone(error):
    with pytest.raises(CloudError, match=r"te2 went meanwhile .* run the same command again") as told:
        with naming_gone(cloud(BOTH[0]), BOTH):
            raise error
    assert told.value.kind is Kind.PASSING and told.value.__cause__ is error


@pytest.mark.parametrize("seen", [cloud(*BOTH), cloud(refuses=True)])
def test_any_other_error_stays_what_it_is(seen):
    with pytest.raises(SshError, match="te2: timed out"):
        with naming_gone(seen, BOTH):
            raise SshError("te2: timed out")


# A new machine's host keys: read when they are the last ones, and asked for again where it shows others.


def another(server):
    with SshServer() as other:
        return other.known_hosts_line.replace(str(other.port), str(server.port))


def test_a_node_that_shows_another_key_than_is_pinned_is_asked_about_once_more(node, server):
    node.known_hosts.write_text(another(server))
    pins = []

    def pin_again():
        pins.append(node.known_hosts.write_text(server.known_hosts_line))

    machines.reached([node], pin_again)
    assert len(pins) == 1
    machines.reached([node], pin_again)
    assert len(pins) == 1, "nothing was wrong"


def test_a_node_that_still_shows_another_key_is_not_trusted(node, server):
    node.known_hosts.write_text(another(server))
    pins = []
    with pytest.raises(SshError, match="its host key is not the one"):
        machines.reached([node], lambda: pins.append(1))
    assert pins == [1]


def test_host_keys_are_read_only_once_the_first_boot_has_made_them(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(1)
        (asked,) = cluster.calls("RunCommand")
        script = base64.b64decode(asked["CommandContent"]).decode()
        assert script.startswith("cloud-init status --wait ") and asked["Timeout"] == "300"
        (tmp_path / "cloud-init").write_text('#!/bin/sh\necho "$@" > "${0%/*}/waited"\n')
        (tmp_path / "cloud-init").chmod(0o755)
        subprocess.run(["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True)
        assert (tmp_path / "waited").read_text() == "status --wait\n"


def test_keys_that_cannot_be_read_yet_are_no_wrong_request(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        (machine,) = cluster.up(1)
        monkeypatch.setattr(cluster.api.paper, "run", lambda *_: (1, b"cat: no such file"))
        with pytest.raises(CloudError, match="no such file; again: fab up") as refused:
            access.asked(cluster.cloud, machine.instance_id)
        assert refused.value.kind is Kind.WAIT
