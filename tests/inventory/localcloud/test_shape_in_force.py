"""A shape put into force by the keeper: on a stand-in for a host with a cable, a network and processes of its own."""

import subprocess

import pytest

from inventory.localcloud import host, inside, shape
from inventory.localcloud.places import Places
from inventory.localcloud.shape import Shape
from tests.support.waiting import until

pytestmark = pytest.mark.localcloud

BOOT = """\
link=$1 boots=$2
echo booted >>"$boots"
unshare --net --pid --fork sleep 300 & outer=$!
until leader=$(pgrep -P $outer); do sleep 0.05; done
ip link add "$link" type veth peer name host0 netns "$leader"
wait
[ $(wc -l <"$boots") = 1 ] && exit 133
exit 0
"""
"""In systemd-nspawn's place: its first boot ends as a reboot does."""


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = Places.of("tls")
    places.host("m1").mkdir(parents=True)
    for folder in inside.folders(places.group("m1")):
        (folder / "keeper").mkdir(parents=True)
    yield places
    host.stop(places, "m1")
    assert inside.groups_named(places.group_prefix) == ()


@pytest.fixture
def boots(places, tmp_path):
    """The keeper of a host that runs; the file has a line a boot."""
    script, boots = tmp_path / "boot.sh", tmp_path / "boots"
    script.write_text(BOOT)
    shape.ask_one(places, "m1", Shape(20, 0.5))
    groups = [str(folder) for folder in inside.folders(places.group("m1"))]
    words = [places.link("m1"), shape.at_boot(places, "m1"), *groups, "--", "sh", str(script), places.link("m1")]
    with subprocess.Popen(["sh", "-c", host.KEEPER, "keeper", *words, str(boots)], start_new_session=True) as keeper:
        yield boots
        host.stop(places, "m1")
        keeper.wait(timeout=60)


def buckets(places):
    """The rates at both ends of the cable, as tc says them."""
    far = ["nsenter", f"--target={inside.leader(places, 'm1')}", "--net"]
    ends = (("tc", "qdisc", "show", "dev", places.link("m1")), (*far, "tc", "qdisc", "show", "dev", "host0"))
    told = [subprocess.check_output(end, text=True).split() for end in ends]
    return [words[words.index("rate") + 1] if "rate" in words else "" for words in told]


def is_shaped(places):
    return inside.leader(places, "m1") is not None and shape.in_force(places, "m1") == Shape(20, 0.5)


def test_the_keeper_slows_both_ends_at_every_boot_and_a_change_is_in_force_at_once(places, boots):
    until(lambda: is_shaped(places), "the first boot is slowed", 20)
    until(lambda: buckets(places) == ["20Mbit", "20Mbit"], "both ends of its cable", 5)
    first = inside.leader(places, "m1")
    subprocess.run(["kill", "-9", str(first)], check=True)
    until(lambda: inside.leader(places, "m1") not in (None, first), "another boot", 20)
    until(lambda: is_shaped(places), "the next boot is slowed", 20)
    until(lambda: buckets(places) == ["20Mbit", "20Mbit"], "both ends of its cable", 5)
    assert boots.read_text().split() == ["booted", "booted"]

    for _ in range(2):
        shape.ask_one(places, "m1", Shape(mbit=5))
        shape.apply(places, "m1")
        assert buckets(places) == ["5Mbit", "5Mbit"] and shape.in_force(places, "m1") == Shape(mbit=5)
    for _ in range(2):
        shape.ask_all(places, Shape())
        shape.apply(places, "m1")
        assert buckets(places) == ["", ""] and shape.in_force(places, "m1") == Shape()
