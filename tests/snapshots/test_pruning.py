"""Which snapshots may go, which one is meant, what they cost."""

import itertools
from datetime import UTC, datetime, timedelta

import pytest

from inventory.cloud.errors import RentError
from inventory.cloud.values import CLUSTER_TAG, Disk, Snapshot
from inventory.renting.cost import SnapshotPrice, certainty, snapshot_gib, snapshot_month
from inventory.renting.members import Existing
from inventory.renting.money_view import stays_lines
from inventory.renting.plan import RentalWish, missing_machines
from inventory.settings import Settings
from snapshots.create import before_creating
from snapshots.listing import KEEP_TAG, YES, Contents, choose, made_from, size_note, to_tags
from snapshots.pruning import all_unused, prune, question, what_is_left
from snapshots.show import list_rows, state, verdict_rows
from snapshots.steps import diff

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def snapshot(number, status="accomplished", *, keep=False, cluster="spotune", **more):
    tags = {CLUSTER_TAG: cluster} if cluster else {}
    if keep:
        tags[KEEP_TAG] = YES
    values = {
        "snapshot_id": f"s-{number}",
        "name": f"n{number}",
        "disk_id": "d-1",
        "disk_kind": "data",
        "disk_gib": 120,
        "status": status,
        "progress_percent": 100 if status == "accomplished" else 40,
        "is_available": status == "accomplished",
        "created": NOW - timedelta(days=10) + timedelta(hours=number),
        "tags": tags,
    }
    return Snapshot(**{**values, **more})


def rented(name, region="cn-hangzhou"):
    return Settings(name=name, provider="aliyun", aliyun={"region": region})


def disk(source, **more):
    values = {
        "disk_id": "d-2",
        "serial": "2",
        "kind": "data",
        "size_gib": 120,
        "category": "cloud_essd",
        "status": "In_use",
        "zone_id": "cn-hangzhou-h",
        "created": NOW,
        "name": "spotune-te1-data",
        "source_snapshot_id": source,
    }
    return Disk(**{**values, **more})


def going(snapshots, disks=(), keep_last=3):
    return [v.snapshot.snapshot_id for v in prune(snapshots, disks, keep_last) if v.delete]


def reason(snapshots, wanted, disks=(), keep_last=3):
    return next(v.reason for v in prune(snapshots, disks, keep_last) if v.snapshot.snapshot_id == wanted)


def test_the_last_n_whole_ones_stay_and_unfinished_ones_do_not_count_among_them():
    snapshots = [snapshot(n) for n in range(5)] + [snapshot(8, "progressing"), snapshot(9, "failed")]
    assert going(snapshots, keep_last=2) == ["s-9", "s-2", "s-1", "s-0"]
    assert reason(snapshots, "s-2", keep_last=2) == "older than the last 2"


def test_a_tagged_one_stays_however_old():
    snapshots = [snapshot(0, keep=True), *(snapshot(n) for n in range(1, 5))]
    assert going(snapshots, keep_last=1) == ["s-3", "s-2", "s-1"]
    assert reason(snapshots, "s-0", keep_last=1) == "made with --keep"


def test_one_that_disks_were_made_from_stays_attached_or_not():
    snapshots = [snapshot(n) for n in range(3)]
    disks = [disk("s-0"), disk("s-1", status="Available", name="kept")]
    assert going(snapshots, disks, keep_last=1) == []
    assert reason(snapshots, "s-1", disks, 1) == "disks made from it exist: kept"
    assert len(made_from(snapshots[0], disks)) == 1


def test_one_in_progress_stays_and_a_failed_one_goes():
    assert going([snapshot(1, "progressing"), snapshot(2, "failed"), snapshot(3)]) == ["s-2"]
    assert reason([snapshot(1, "progressing")], "s-1") == "still being made (40 %)"


def test_the_only_whole_one_stays_whatever_is_asked():
    assert going([snapshot(1), snapshot(2), snapshot(3, "progressing")], keep_last=0) == ["s-1"]
    assert reason([snapshot(1)], "s-1", keep_last=0) == "the only whole one"


def test_a_count_below_0_is_refused():
    with pytest.raises(RentError, match="--keep-last -1"):
        prune([], [], -1)


def test_no_prune_of_any_mixture_breaks_a_rule():
    kinds = [
        {"status": "accomplished"},
        {"status": "accomplished", "keep": True},
        {"status": "progressing"},
        {"status": "failed"},
        {"status": "accomplished", "used": True},
    ]
    for mixture in itertools.product(kinds, repeat=4):
        snapshots = [snapshot(n, k["status"], keep=k.get("keep", False)) for n, k in enumerate(mixture)]
        disks = [disk(f"s-{n}") for n, k in enumerate(mixture) if k.get("used")]
        for keep_last in range(3):
            gone = {*going(snapshots, disks, keep_last)}
            whole = [s for s in snapshots if s.status == "accomplished"]
            staying = [s for s in whole if s.snapshot_id not in gone]
            assert len(staying) >= min(len(whole), max(1, keep_last))
            for n, kind in enumerate(mixture):
                assert not (
                    f"s-{n}" in gone and (kind.get("keep") or kind.get("used") or kind["status"] == "progressing")
                )


@pytest.mark.parametrize(
    ("found", "asked", "words"),
    [
        (
            [],
            "latest",
            "there is no snapshot of cluster 'spotune' in cn-hangzhou; fab snapshots.create makes one",
        ),
        ([], "s-77", "no snapshot s-77 in cn-hangzhou; snapshots belong to one region"),
        ([snapshot(1, "failed")], "s-1", "failed: nothing can be made from it"),
        ([snapshot(1, "failed")], "latest", "no snapshot of cluster 'spotune' in cn-hangzhou can be used: s-1"),
        ([snapshot(1, cluster="")], "s-1", "has no tag spotune:cluster: spotune did not make it"),
        ([snapshot(1, cluster="other")], "s-1", "belongs to the cluster 'other'"),
        ([snapshot(1, disk_kind="system")], "s-1", "is of a system disk"),
        (
            [snapshot(1, cluster="", disk_kind="system", name="")],
            "s-1",
            "(no name, system disk, 120 GiB) is of a system",
        ),
    ],
)
def test_each_unfit_snapshot_is_refused_in_one_sentence(found, asked, words):
    with pytest.raises(RentError) as refused:
        choose(asked, found, rented("spotune"))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_copy_from_another_region_needs_one_tag_and_then_serves():
    with pytest.raises(RentError, match=r"CopySnapshot.* the copy tagged spotune:cluster=demo\."):
        choose("s-9", [], rented("demo", "cn-beijing"))
    bare = snapshot(9, cluster="", disk_id="")
    with pytest.raises(RentError, match=r"tag the copy spotune:cluster=demo$"):
        choose("s-9", [bare], rented("demo", "cn-beijing"))
    copied = snapshot(9, cluster="demo", disk_id="")
    for asked in ("s-9", "latest"):
        assert choose(asked, [copied], rented("demo", "cn-beijing")) == copied
    plan = diff(missing_machines(RentalWish(2, 4, copied), Existing((), ()), NOW), 120)
    assert plan.steps[0].what == "rent 2 machines: te1, te2 from s-9" and plan.notes == ()
    assert list_rows([copied], [], SnapshotPrice(0.12), NOW)[0][5:] == ["complete", "-", "-", "-", "-", "-"]


def test_prune_all_takes_everything_that_no_disk_was_made_from_and_says_what_is_lost():
    snapshots = [snapshot(0, keep=True), snapshot(1), snapshot(2, "progressing"), snapshot(3, "failed")]
    verdicts = {v.snapshot.snapshot_id: v for v in all_unused(snapshots, [disk("s-1")])}
    assert [v.delete for v in verdicts.values()] == [True, True, False, True]
    assert verdicts["s-0"].reason == "all; although made with --keep"
    assert verdicts["s-2"].reason == "all; still being made (40 %), which ends then"
    assert question(verdicts.values()) == "delete 3 snapshots? They cannot be had back."
    assert question(all_unused(snapshots, [])).endswith("fab rebuild has nothing to build from.")


def test_a_prune_that_leaves_some_says_that_they_cost_on_and_how_they_go():
    three = [snapshot(0), snapshot(1), snapshot(2)]
    assert list(what_is_left(prune(three, [], 3), everything=False)) == [
        "nothing to delete",
        "3 snapshots stay and cost on; to delete those too: fab snapshots.prune --all",
    ]
    one = "1 snapshot stays and costs on; to delete it too: fab snapshots.prune --all"
    assert list(what_is_left(prune(three, [], 1), everything=False)) == [one]
    assert list(what_is_left((), everything=False)) == ["nothing to delete"]


def test_latest_is_the_newest_that_did_not_fail_also_one_in_progress():
    found = [snapshot(1), snapshot(2, "progressing"), snapshot(3, "failed"), snapshot(4, disk_kind="system")]
    assert choose("latest", found, rented("spotune")).snapshot_id == "s-2"


def test_a_named_one_in_progress_is_taken_and_its_zone_does_not_matter():
    assert choose("s-2", [snapshot(2, "progressing")], rented("spotune")).snapshot_id == "s-2"


def test_other_disk_sizes_are_said_and_the_same_is_not():
    assert size_note(snapshot(1), 120) == ""
    assert "the base deploy grows them" in size_note(snapshot(1), 200)
    assert "so 120 GiB are made and billed" in size_note(snapshot(1), 40)


def test_what_a_snapshot_costs_is_its_written_blocks_not_the_disks_size():
    told = snapshot(1, size_bytes=67 * 2**30)
    tagged = snapshot(1, tags={CLUSTER_TAG: "spotune", "spotune:written-gib": "10.0"})
    assert snapshot_month(told, 0.12) == pytest.approx(8.04)
    assert snapshot_gib(tagged) == 10
    assert snapshot_gib(snapshot(1)) is None and snapshot_month(snapshot(1), 0.12) == pytest.approx(120 * 0.12)
    said = before_creating(67, 120, SnapshotPrice(0.12, "CNY"), "aliyun.snapshot_price_gib_month")
    assert "about 8.04 CNY a month at 0.12 CNY a month a GiB" in said
    assert "at most 14.40 CNY a month, had all 120 GiB been written once" in said
    assert [certainty(each) for each in (told, tagged, snapshot(1))] == ["", "about", "at most"]


def test_what_a_snapshot_will_cost_is_not_rounded_on_its_way_to_its_tag():
    tagged = snapshot(1, tags=to_tags(Contents("spotune", written_gib=1.749)))
    price = SnapshotPrice(0.12, "CNY")
    assert price.words(tagged) in before_creating(1.749, 120, price, "key")


@pytest.mark.parametrize(
    "of", [{"size_bytes": 2**31}, {"tags": {CLUSTER_TAG: "spotune", "spotune:written-gib": "1.75"}}, {}]
)
def test_every_place_says_the_same_price_of_a_snapshot(of):
    each, price = snapshot(1, **of), SnapshotPrice(0.12, "CNY")
    (stays,) = stays_lines((), {}, [each], Settings(), "CNY")
    said = price.words(each)
    assert said in stays and said.startswith(certainty(each))
    cells = {list_rows([each], [], price, NOW)[0][4], verdict_rows(prune([each], []), price, NOW)[0][4]}
    assert {f"{cell} a month" for cell in cells} == {said}


def test_the_list_says_what_one_wants_to_know_newest_first():
    tags = {CLUSTER_TAG: "spotune", "spotune:run": "tiny-1", "spotune:step": "8", "spotune:models-1": "tiny"}
    rows = list_rows([snapshot(1), snapshot(2, size_bytes=2**30, tags=tags)], [disk("s-2")], SnapshotPrice(0.5), NOW)
    assert rows[0] == [
        "s-2",
        "n2",
        "10 d",
        "1.0",
        "0.50",
        "complete",
        "tiny-1 step 8",
        "tiny",
        "-",
        "-",
        "spotune-te1-data",
    ]
    assert rows[1][0] == "s-1" and rows[1][3:5] == ["?", "at most 60.00"]
    assert verdict_rows(prune([snapshot(1)], []), SnapshotPrice(0.5), NOW)[0][0] == "keep"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (snapshot(1), "complete"),
        (snapshot(1, "progressing"), "40 %"),
        (snapshot(1, "progressing", is_available=True), "usable, 40 %"),
        (snapshot(1, "failed"), "failed"),
    ],
)
def test_how_far_a_snapshot_is(given, said):
    assert state(given) == said
