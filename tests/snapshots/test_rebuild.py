"""Desired against existing: the steps of a rebuild, their order, and that none is left once they are done."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from inventory.cloud.errors import RentError
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Price, Snapshot
from inventory.renting.members import Existing
from inventory.renting.offers import Offer, Quote
from inventory.renting.plan import RentalWish, missing_machines
from inventory.renting.tags import NODE_TAG
from inventory.shown import clock
from snapshots import steps
from snapshots.listing import UNFROZEN_TAG, YES
from snapshots.rebuild import Rebuilding, next_step
from snapshots.steps import DEPLOYED_TAG, WARMED_TAG, refuse_another

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
TAGS = {CLUSTER_TAG: "demo"}
SNAPSHOT = Snapshot("s-1", "n", "d-0", "data", 120, "accomplished", 100, True, NOW, tags=TAGS)
HOUR = Price(10.0, 12.0, "CNY")


def desired(nodes=2, **more):
    return {"nodes": nodes, "snapshot": SNAPSHOT, "named": False, "disk_gib": 120, **more}


def diff(wanted, there, price=None):
    """The steps of a rebuild, as `planned` comes to them."""
    machines = missing_machines(RentalWish(wanted["nodes"], 4, wanted["snapshot"]), there, NOW)
    if wanted["named"]:
        refuse_another("demo", machines)
    quotes = (Quote(Offer("ecs.local.small", "z-h"), price, launch=None),) if price else ()
    return steps.diff(replace(machines, quotes=quotes), wanted["disk_gib"])


def machine(k, *, deployed=True, status="Running", locks=()):
    tags = TAGS | ({DEPLOYED_TAG: YES} if deployed else {})
    return Instance(f"i-{k}", f"demo-te{k}", status, "ecs.local.small", "z-h", NOW, tags=tags, locks=locks)


def disk(k, *, instance=True, source="s-1", zone="z-h", warmed=True):
    return Disk(
        f"d-{k}",
        str(k),
        "data",
        120,
        "cloud_essd",
        "In_use" if instance else "Available",
        zone,
        NOW,
        name=f"demo-te{k}-data",
        instance_id=f"i-{k}" if instance else "",
        source_snapshot_id=source,
        tags=TAGS | {NODE_TAG: f"te{k}"} | ({WARMED_TAG: YES} if warmed else {}),
    )


def existing(*ks, warmed=True, **more):
    return Existing(tuple(machine(k, **more) for k in ks), tuple(disk(k, warmed=warmed) for k in ks))


def kinds(plan):
    return [step.kind for step in plan.steps]


def test_from_nothing_it_takes_machines_deploy_warming_and_the_doctor():
    plan = diff(desired(), Existing((), ()), HOUR)
    assert kinds(plan) == ["machines", "deploy", "warm", "doctor"]
    rent = plan.steps[0]
    assert rent.what == "rent 2 machines: te1, te2 from s-1"
    end = clock(NOW + timedelta(hours=4))
    assert (rent.reason, rent.cost) == ("there are none", f"20.00 CNY an hour, 80.00 CNY until {end}")
    assert plan.steps[2].what == "read what training needs on te1, te2"
    assert all(step.reason and step.cost for step in plan.steps)


def test_a_finished_cluster_needs_nothing():
    assert diff(desired(), existing(1, 2)).steps == ()


def test_a_lost_head_is_made_again_with_its_disk_although_the_others_are_enough():
    there = existing(2, 3)
    plan = diff(desired(2), there)
    assert kinds(plan) == ["machines", "deploy", "warm", "doctor"]
    assert plan.steps[0].what == "rent 1 machine: te1 from s-1"
    assert plan.steps[0].reason == "te1, the head, is not there"
    kept = diff(desired(2), replace(there, disks=(*there.disks, disk(1, instance=False))))
    assert "te1 with its kept disk d-1" in kept.steps[0].what


def test_one_lost_node_is_one_machine_and_a_deploy_on_all():
    plan = diff(desired(3), existing(1, 3))
    assert kinds(plan) == ["machines", "deploy", "warm", "doctor"]
    assert plan.steps[0].what == "rent 1 machine: te2 from s-1"
    assert plan.steps[0].reason == "3 wanted, 2 there"
    assert plan.steps[2].what == "read what training needs on te2"


@pytest.mark.parametrize("ends", [True, False])
def test_ctrl_c_skips_what_is_still_to_be_read_or_ends_all(ends):
    said = []
    rebuilding = Rebuilding(None, None, None, "", (), int, said.append, ctrl_c_ends=ends)
    rebuilding.reading = SimpleNamespace(watch=lambda show: None, began=0.0, ended=0.0)
    with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
        rebuilding._warm(None)
    assert bool(said) is not ends


def test_what_was_interrupted_goes_on_where_it_was():
    bare = diff(desired(), existing(1, 2, deployed=False, warmed=False))
    assert kinds(bare) == ["machines", "deploy", "warm", "doctor"]
    assert (bare.steps[0].what, bare.steps[0].cost) == ("see to disks and host keys of te1, te2", "nothing")
    assert kinds(diff(desired(), existing(1, 2, warmed=False))) == ["warm", "doctor"]


def test_machines_that_were_rented_and_got_no_disk_get_one_whichever_snapshot_was_named():
    there = replace(existing(1, 2, deployed=False), disks=(disk(1),))
    plan = diff(desired(named=True, snapshot=replace(SNAPSHOT, snapshot_id="s-2")), there)
    assert kinds(plan) == ["machines", "deploy", "warm", "doctor"]
    assert plan.steps[0].cost == "the data disk of te2, by the hour"
    assert plan.steps[2].what == "read what training needs on te2"


def test_disks_that_were_never_a_snapshot_need_no_warming():
    there = existing(1, 2, warmed=False)
    fresh = replace(there, disks=tuple(replace(d, source_snapshot_id="") for d in there.disks))
    assert diff(desired(), fresh).steps == ()


def test_stopped_machines_are_started_and_billed():
    plan = diff(desired(1), existing(1, status="Stopped"))
    assert kinds(plan) == ["machines", "doctor"]
    assert (plan.steps[0].what, plan.steps[0].cost) == ("start te1", "billed by the hour again")


def test_a_kept_disk_goes_to_its_node_before_the_snapshot_and_is_not_waited_for():
    half = replace(SNAPSHOT, status="progressing", progress_percent=30, is_available=False)
    plan = diff(desired(1, snapshot=half), Existing((), (disk(1, instance=False),)))
    assert kinds(plan) == ["machines", "deploy", "doctor"]
    assert "te1 with its kept disk d-1 if it can be in z-h" in plan.steps[0].what
    assert any("te1 gets its own disk d-1 back" in note for note in plan.notes)


@pytest.mark.parametrize(("available", "waits"), [(True, False), (False, True)])
def test_a_snapshot_in_progress_is_used_when_it_can_be_and_waited_for_when_not(available, waits):
    half = replace(SNAPSHOT, status="progressing", progress_percent=30, is_available=available)
    plan = diff(desired(snapshot=half), Existing((), ()))
    assert (kinds(plan)[0] == "wait") == waits
    if waits:
        assert plan.steps[0].reason == "it is still being made (30 %)"


def test_a_kept_disk_that_was_never_read_ahead_is_read_then():
    plan = diff(desired(1), Existing((), (disk(1, instance=False, warmed=False),)))
    assert kinds(plan) == ["machines", "deploy", "warm", "doctor"]


def test_a_reclaimed_machine_does_not_count_and_is_said():
    there = replace(existing(1, 2), instances=(machine(1), machine(2, locks=("recycling",))))
    plan = diff(desired(), there)
    assert plan.steps[0].what == "rent 1 machine: te2 from s-1"
    assert any("being reclaimed" in note for note in plan.notes)


def test_fewer_wanted_than_there_are_removes_none():
    plan = diff(desired(1), existing(1, 2))
    assert plan.steps == () and "a rebuild removes none; fab down does" in plan.notes[0]


def test_another_disk_size_and_an_unfrozen_snapshot_are_noted_where_disks_are_made():
    marked = replace(SNAPSHOT, tags=TAGS | {UNFROZEN_TAG: YES})
    notes = diff(desired(disk_gib=200, snapshot=marked), Existing((), ())).notes
    assert "the base deploy grows them" in notes[0] and "as a power cut leaves it" in notes[1]
    assert diff(desired(disk_gib=200, snapshot=marked), existing(1, 2)).notes == ()


def test_standing_machines_are_not_taken_back_to_another_snapshot():
    other = replace(SNAPSHOT, snapshot_id="s-2")
    with pytest.raises(RentError, match=r"stand, on disks made from s-1; .* For s-2: (.*)") as refused:
        diff(desired(snapshot=other, named=True), existing(1, 2))
    way = "fab down --disks, then fab rebuild --snapshot s-2; with d-1 goes all that was written there"
    assert way in str(refused.value), "without --disks the head's kept disk would come back in the snapshot's place"
    assert diff(desired(snapshot=other), existing(1, 2)).steps == ()
    assert diff(desired(named=True), existing(1, 2)).steps == ()


def test_a_head_whose_disk_has_nothing_of_the_snapshot_is_said_with_the_way_to_restore_it():
    blank = disk(1, source="", warmed=False)
    plan = diff(desired(1), Existing((machine(1, deployed=False),), (blank,)))
    (note,) = plan.notes
    assert note.startswith("te1 has d-1, which was not made from s-1: this rebuild restores no run and no model of ")
    assert "To have them: fab down --disks, then fab rebuild --snapshot s-1; with d-1 goes all that was" in note
    assert [s.what for s in plan.steps if s.kind == "deploy"] == ["base deploy: what te1's disk does not have"]
    kept = diff(desired(1), Existing((), (replace(blank, instance_id="", status="Available"),)))
    assert [note.split(",")[0] for note in kept.notes] == ["te1 gets back d-1"]


def test_a_head_on_the_disk_that_the_snapshot_was_taken_of_lacks_nothing_of_it():
    original = disk(1, source="", warmed=False)
    taken = replace(SNAPSHOT, disk_id=original.disk_id)
    plan = diff(desired(snapshot=taken), Existing((machine(1),), (original,)))
    assert kinds(plan)[0] == "machines" and plan.notes == ()
    worker = disk(2, source="", warmed=False)
    assert diff(desired(), Existing((machine(1), machine(2)), (disk(1), worker))).notes == ()


def test_what_follows_a_rebuild_goes_by_the_newest_run_there():
    finished, stopped = ("tiny-20261121-101500", "finished"), ("tiny-20261121-111500", "stopped")
    assert next_step([finished, stopped]).startswith("next: fab train --resume tiny-20261121-111500, or fab train ")
    said = next_step([stopped, finished])
    assert "--resume" not in said and "tiny-20261121-101500, the newest run, is finished: fab generate --run" in said
    assert "--resume" not in next_step([]) and "--resume" in next_step(None)


def done(there, plan, wanted):
    """What exists once a plan's steps are done, as the cloud would say."""
    instances, disks = {i.name: i for i in there.instances}, {d.name: d for d in there.disks}
    for step in plan.steps:
        if step.kind == "machines":
            for k in range(1, wanted["nodes"] + 1):
                instances.setdefault(f"demo-te{k}", machine(k, deployed=False))
                free = disks.get(f"demo-te{k}-data")
                disks[f"demo-te{k}-data"] = replace(free or disk(k, warmed=False), instance_id=f"i-{k}")
            instances = {name: replace(i, status="Running") for name, i in instances.items()}
        elif step.kind == "deploy":
            instances = {name: replace(i, tags={**i.tags, DEPLOYED_TAG: YES}) for name, i in instances.items()}
        elif step.kind == "warm":
            disks = {name: replace(d, tags={**d.tags, WARMED_TAG: YES}) for name, d in disks.items()}
    return Existing(tuple(instances.values()), tuple(disks.values()))


def test_from_any_state_the_steps_lead_to_a_cluster_that_needs_nothing():
    machines_of = {"bare": {"deployed": False}, "asleep": {"status": "Stopped"}, "cold": {}, "fine": {}}
    states = [None, "kept", "kept cold", *machines_of]
    for state in itertools.product(states, repeat=3):
        each = [(k, s) for k, s in enumerate(state, 1) if s]
        machines = tuple(machine(k, **machines_of[s]) for k, s in each if s in machines_of)
        disks = tuple(disk(k, instance="kept" not in s, warmed="cold" not in s) for k, s in each)
        there, wanted = Existing(machines, disks), desired(3)
        plan = diff(wanted, there)
        assert not plan.steps or plan.steps[-1].kind == "doctor"
        order = ["wait", "machines", "deploy", "warm", "doctor"]
        assert [order.index(k) for k in kinds(plan)] == sorted(order.index(k) for k in kinds(plan))
        assert diff(wanted, done(there, plan, wanted)).steps == (), state
