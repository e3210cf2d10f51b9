"""`fab runs` and `fab runs.delete`: what there is here and on the head, and what nobody has once it is gone."""

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
from invoke import Context, Exit

from inventory.setting_types import SettingsError
from tests.support import programs
from tests.support.run_folders import make_run, supervisor_of
from training.laptop import at_risk, data_size, runs, status
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.status import runs_table, since
from training.laptop.tasks import data, train
from training.laptop.tasks import status as status_task
from training.run.folder import STATUS, Status, is_run_id, status_text
from training.run.history import note_start, read_starts
from training.run.launch import LaunchError
from training.run.notices import parse_notices
from training.text.files import bounded_json, figure_in

OLD, NEW, MINE = "tiny-20260130-120000", "tiny-20260131-154500", "tiny-20260129-080000"


@pytest.fixture
def places(tmp_path):
    """The folders of runs: the laptop's, the head's."""
    home, there = tmp_path / "home runs", tmp_path / "head"
    home.mkdir(), there.mkdir()
    return home, there


def rows_of(home, there):
    return status.merged_rows(status.on_laptop(home), status.on_head(HereHead(there)))


def row_of(home, there, run_id=NEW):
    return next(row for row in rows_of(home, there) if row.run_id == run_id)


def test_runs_of_both_places_are_one_list_with_the_newest_first(places):
    home, there = places
    make_run(there, NEW)
    make_run(home, NEW)
    make_run(there, OLD)
    make_run(home, MINE)
    found = rows_of(home, there)
    assert [row.run_id for row in found] == [NEW, OLD, MINE]
    assert [(row.laptop is not None, row.head is not None) for row in found] == [
        (True, True),
        (False, True),
        (True, False),
    ]


def test_a_row_says_how_far_how_large_and_what_it_cost(places):
    home, there = places
    run = make_run(there, NEW, steps=(2, 4))
    (run / "big").write_bytes(os.urandom(3 << 20))
    (run / "launch.json").write_text(json.dumps({"run_id": NEW, "cluster": "demo", "hosts": []}, indent=1))
    (line,) = status.row_lines(rows_of(home, there))
    told = dict(zip(status.HEADER, line, strict=True))
    assert (told["model"], told["state"], told["step"], told["cost"]) == ("tiny", "finished", "6/8", "3.00 CNY")
    assert (told["laptop"], told["head"], told["fetched"]) == ("-", "3.0 MiB", "no")
    (values,) = map(status.row_values, rows_of(home, there))
    assert values["cluster"] == "demo"
    assert (values["cost"], values["currency"], values["head_steps"], values["laptop_bytes"]) == (
        3.0,
        "CNY",
        [2, 4],
        None,
    )


def test_a_run_that_was_resumed_began_at_its_first_start(places):
    home, there = places
    run = make_run(there, NEW)
    for at, command in ((1769874000.5, 'fab train --set "x={"at": 1}"'), (1769881234.0, "fab train --resume")):
        note_start(run, SimpleNamespace(command=command, hosts=()), at)
    (row,) = rows_of(home, there)
    assert row.started == 1769874000.5
    assert status.row_values(row)["begun"] == "2026-01-31T15:40:00.500000+00:00"


@pytest.mark.parametrize(
    ("at_home", "on_head", "best", "said"),
    [
        ((4,), (2, 4), "", "step 4"),
        ((2,), (2, 4), "step-2", "step 2"),  # the best came, though a newer one is there
        ((2,), (2, 4), "", "step 2, not step 4"),
        ((), (2, 4), "", "logs, not step 4"),
        ((), (), "", "logs"),
    ],
)
def test_what_came_home_is_held_against_what_a_fetch_would_bring(places, at_home, on_head, best, said):
    home, there = places
    make_run(home, NEW, steps=at_home)
    make_run(there, NEW, steps=on_head, best=best)
    assert row_of(home, there).home == said


def test_a_run_fetched_while_it_ran_is_not_taken_for_a_lost_one_and_one_made_here_is(places):
    home, there = places
    make_run(home, NEW, state="running")
    make_run(home, MINE, state="running", run_dir=str(home / MINE))
    assert row_of(home, there).state == "fetched while it ran"
    assert row_of(home, there, MINE).state == "lost"
    assert row_of(home, there, MINE).home == "made here, no checkpoint"


def test_a_run_made_here_says_whether_what_it_learned_is_where_it_is_loaded_from(places):
    home, there = places
    run = make_run(home, MINE, steps=(4,), run_dir=str(home / MINE))
    assert row_of(home, there, MINE).home == f"made here, not verified yet: fab fetch --run {MINE} --here"
    (run / "checkpoints" / "step-4" / "adapter").mkdir()
    (run / "adapter").symlink_to("checkpoints/step-4/adapter")
    assert row_of(home, there, MINE).home == "made here"


def deleted(places, *ids, only=""):
    """Delete as the task does; the lines said before."""
    home, there = places
    going = at_risk.plan_deletion(rows_of(home, there), ids, only)
    said = list(at_risk.deletion_lines(going, head_asked=True))
    if going.of("head"):
        assert at_risk.delete_on_nodes(going, Session(HereHead(there))) == {}
    at_risk.delete_on_laptop(going, home)
    return said


def left(places):
    return [sorted(path.name for path in place.iterdir()) for place in places]


def test_a_run_goes_from_both_places_and_nothing_else_does(places):
    for place in places:
        make_run(place, NEW)
        make_run(place, OLD)
    said = deleted(places, NEW)
    assert left(places) == [[OLD], [OLD]]
    assert (
        said[0].startswith(f"delete  {NEW}  ") and "on the laptop and " in said[0] and said[0].endswith("on the head")
    )
    assert [line.split()[-1] for line in said if line.startswith("frees")] == ["laptop", "head"]


def test_one_place_can_be_freed_while_the_other_copy_stays(places):
    for place in places:
        make_run(place, NEW, steps=(4,))
    said = deleted(places, NEW, only="head")
    assert left(places) == [[NEW], []]
    assert not any("no copy is left" in line for line in said)


@pytest.mark.parametrize("only", ["", "head"])
def test_the_only_copy_of_what_a_run_learned_is_named_before_it_goes(places, only):
    home, there = places
    make_run(home, NEW)  # metadata alone
    make_run(there, NEW, steps=(2, 4))
    assert deleted(places, NEW, only=only)[-1] == f"{NEW}: no copy is left of what it learned (step 4)"


def test_a_folder_of_another_run_is_no_copy(places):
    home, there = places
    make_run(home, NEW, steps=(4,), claim="another's")
    make_run(there, NEW, steps=(4,))
    assert row_of(home, there).home == "another run of this id"
    assert "no copy is left" in deleted(places, NEW, only="head")[-1]


def test_a_run_that_is_going_on_is_not_deleted(places):
    _, there = places
    run = make_run(there, NEW, state="running")
    with supervisor_of(run) as supervisor:
        (run / STATUS).write_text(status_text(Status(NEW, "running", supervisor_pid=supervisor.pid)))
        with pytest.raises(LaunchError, match=f"{NEW} is going on"):
            deleted(places, NEW)
    assert left(places) == [[], [NEW]]


@pytest.mark.parametrize(
    ("ids", "only", "said"),
    [
        ((NEW, "tiny-20200101-000000"), "", "there is no run tiny-20200101-000000; fab runs lists them"),
        (("../home",), "", "there is no run ../home"),
        ((), "", "which runs?"),
        ((NEW,), "laptop", f"{NEW} is not on the laptop"),
        ((NEW,), "moon", "--only moon: laptop and head are possible"),
    ],
)
def test_what_cannot_be_deleted_is_said_and_nothing_goes(places, ids, only, said):
    make_run(places[1], NEW)
    with pytest.raises(LaunchError, match=said):
        deleted(places, *ids, only=only)
    assert left(places) == [[], [NEW]]


def test_a_link_is_removed_and_not_followed(places, tmp_path):
    home, _ = places
    target = make_run(tmp_path / "elsewhere", NEW)
    (home / NEW).symlink_to(target)
    deleted(places, NEW)
    assert left(places) == [[], []] and target.is_dir()


UNREACHABLE = """provider = "static"
[ssh]
key = "{key}"
[[nodes]]
name = "te1"
address = "127.0.0.1"
port = 1
"""


def fab(folder, *words):
    (folder / "fabfile.py").write_text("from training.laptop.list_tasks import namespace\n")
    (folder / "id").touch()
    (folder / "cluster.toml").write_text(UNREACHABLE.format(key=folder / "id"))
    env = {**os.environ, "PYTHONPATH": programs.PATH, "SPOTUNE_CLUSTER": str(folder / "cluster.toml")}
    argv = [sys.executable, "-m", "fabric", *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_head_that_does_not_answer_leaves_the_laptops_runs_and_one_line(tmp_path):
    make_run(tmp_path / "runs", NEW, steps=(4,))
    done = fab(tmp_path, "runs")
    assert done.returncode == 0 and NEW in done.stdout
    assert done.stderr.startswith("these are the laptop's alone; the head could not be asked: te1 (127.0.0.1:1): ")
    assert len(done.stderr.splitlines()) == 1
    here = fab(tmp_path, "runs", "--here")
    assert (here.returncode, here.stdout, here.stderr) == (0, done.stdout, "")
    asked = fab(tmp_path, "runs.delete", "--run", NEW)
    assert asked.returncode == 2 and f"fab runs.delete {NEW} --yes" in asked.stderr
    assert "as far as is known here: the head was not asked" in asked.stdout.splitlines()[-1]
    assert fab(tmp_path, "runs.delete", "--run", NEW, "--yes").returncode == 0
    assert not (tmp_path / "runs" / NEW).exists()


@pytest.mark.parametrize("here", [[], ["--here"]], ids=["the head is asked in vain", "here"])
def test_of_a_run_made_on_this_machine_no_head_is_spoken_of_as_it_is_deleted(tmp_path, here):
    run = make_run(tmp_path / "runs", NEW, steps=(4,))
    (run / "launch.json").write_text(json.dumps({"run_dir": str(run)}))
    asked = fab(tmp_path, "runs.delete", "--run", NEW, *here)
    assert asked.stdout.splitlines()[-1] == f"{NEW}: no copy is left of what it learned (step 4)"
    assert " ".join(["runs.delete", NEW, *here, "--yes"]) in asked.stderr and "could not be asked" not in asked.stdout
    assert fab(tmp_path, "runs.delete", "--run", NEW, *here, "--yes").returncode == 0
    assert not run.exists()


def test_the_laptops_copies_alone_are_deleted_without_asking_a_head(tmp_path):
    make_run(tmp_path / "runs", NEW, steps=(4,))
    done = fab(tmp_path, "runs.delete", "--run", NEW, "--here", "--yes")
    assert done.returncode == 0 and "could not be asked" not in done.stdout
    assert "as far as is known here: the head was not asked" in done.stdout
    assert not (tmp_path / "runs" / NEW).exists()


HINT = "; for what was made on this machine add --here"
BAD_NODE = 'provider = "static"\n[[nodes]]\nname = "te1"\naddress = "root@192.0.2.1"\n'


@pytest.mark.parametrize(
    ("ran_in", "toml", "hint"),
    [
        ("", 'provider = "static"\n', HINT),
        ("", None, HINT),
        ("/data", 'provider = "static"\n', ""),
        ("", BAD_NODE, ""),
        ("", "colour = 1\n", ""),
    ],
)
def test_where_there_is_no_cluster_a_run_of_this_machine_is_remembered(tmp_path, monkeypatch, ran_in, toml, hint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    if toml:
        (tmp_path / "cluster.toml").write_text(toml)
    run = tmp_path / "runs" / "tiny-20261123-160011"
    run.mkdir(parents=True)
    (run / "launch.json").write_text(json.dumps({"run_dir": ran_in or str(run)}))
    with pytest.raises(SettingsError) as refused, open_cluster(False):
        pytest.fail("there is no cluster")
    assert str(refused.value).endswith(hint) and ("--here" in str(refused.value)) is bool(hint)
    with pytest.raises(Exit) as told:
        status_task.body(Context())
    assert ("add --here" in told.value.message) is bool(hint)


def test_where_no_cloud_can_be_asked_yet_a_train_says_what_here_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    toml = tmp_path / "cluster.toml"
    toml.write_text('name = "nobody1"\nprovider = "aliyun"\n[aliyun]\nendpoint = "local"\n')
    run = tmp_path / "runs" / "tiny-20261123-160011"
    run.mkdir(parents=True)
    (run / "launch.json").write_text(json.dumps({"run_dir": str(run)}))
    with pytest.raises(Exit) as told:
        train.body(Context(), model="tiny")
    assert (
        told.value.message
        == "the local cloud that cluster.toml names does not run: fab local.serve; --here trains on this machine"
    )
    for earlier in ({"resume": True}, {"from_adapter": run.name}):
        with pytest.raises(Exit) as told:
            train.body(Context(), **earlier)
        assert told.value.message.endswith("fab local.serve; for what was made on this machine add --here"), earlier
    toml.write_text('provider = "static"\n')
    with pytest.raises(Exit) as told:
        train.body(Context(), model="tiny")
    assert "--here trains" not in told.value.message


@pytest.mark.parametrize("lacks", [(), ("no_such_library",)])
def test_where_no_cloud_can_be_asked_a_look_at_a_data_set_of_the_hub_names_here_if_it_would_help(
    tmp_path, monkeypatch, lacks
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setattr(data_size, "NEEDED", lacks)
    (tmp_path / "cluster.toml").write_text('name = "nobody1"\nprovider = "aliyun"\n[aliyun]\nendpoint = "local"\n')
    with pytest.raises(Exit) as told:
        data.body(Context(), model="tiny", data=["owner/some-data"])
    hint = "" if lacks else "; --here looks at the data on this machine"
    assert told.value.message == f"the local cloud that cluster.toml names does not run: fab local.serve{hint}"


def test_of_many_runs_the_newest_are_named_as_such(tmp_path):
    for number in range(7):
        make_run(tmp_path / "runs", f"tiny-2026010{number + 1}-000000", steps=(4,))
    with pytest.raises(LaunchError, match=r"; the newest of 7: tiny-20260103-000000, .*tiny-20260107-000000$"):
        runs.find(HereHead(tmp_path / "runs"), "tiny-20250101-000000")


def trained_from(run, base):
    (run / "recipe.toml").write_text(f"name = {json.dumps(run.name)}\nbase_model = {json.dumps(f'folder:{base}')}\n")


@pytest.mark.parametrize("here", [[], ["--here"]], ids=["the head is asked in vain", "here"])
def test_a_run_whose_merged_model_another_was_trained_from_goes_with_that_one_or_by_force(tmp_path, here):
    parent, child = (make_run(tmp_path / "runs", run_id, steps=(4,)) for run_id in (OLD, NEW))
    (parent / "merged").mkdir()
    trained_from(child, parent / "merged")
    refused = fab(tmp_path, "runs.delete", "--run", OLD, "--yes", *here)
    assert refused.returncode == 2 and parent.is_dir()
    assert refused.stderr.startswith(f"{parent}/merged is the base model of {NEW}, which cannot be asked")
    trained_from(make_run(tmp_path / "runs", MINE, steps=(4,)), parent / "merged")
    told = fab(tmp_path, "runs.delete", "--run", OLD, "--yes", *here).stderr
    assert all(run in told.partition("name ")[2] for run in (NEW, MINE)), "all are named at once"
    shutil.rmtree(tmp_path / "runs" / MINE)
    both = fab(tmp_path, "runs.delete", "--run", OLD, "--run", NEW, *here)
    assert "There is no terminal to ask at" in both.stderr
    asked = fab(tmp_path, "runs.delete", "--run", OLD, "--force", *here)
    assert " ".join([f"fab runs.delete {OLD} --force", *here, "--yes"]) in asked.stderr
    assert fab(tmp_path, "runs.delete", "--run", OLD, "--force", "--yes", *here).returncode == 0
    assert not parent.exists() and child.is_dir()


def test_a_run_that_learned_nothing_keeps_no_base_and_one_on_the_head_does(places):
    home, there = places
    parent = make_run(home, OLD, steps=(4,))
    (parent / "merged").mkdir()
    trained_from(make_run(there, MINE), parent / "merged")
    at_risk.refuse_bases(at_risk.plan_deletion(rows_of(home, there), [OLD], ""), rows_of(home, there), home)
    trained_from(make_run(there, NEW, steps=(2,)), parent / "merged")
    found = rows_of(home, there)
    with pytest.raises(LaunchError, match=f"is the base model of {NEW}"):
        at_risk.refuse_bases(at_risk.plan_deletion(found, [OLD], ""), found, home)
    at_risk.refuse_bases(at_risk.plan_deletion(found, [OLD, NEW], ""), found, home)


BIG = "1" + "0" * 400
A_STATUS = {"run_id": NEW, "state": "failed", "supervisor_pid": 0, "started": 1, "updated": 1, "price_h": 2.5}
A_STEP = {"step": 1, "total_steps": 2, "loss": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "memory_gib": 1.0, "step_s": 1.0}


def with_value(whole, key, value):
    return json.dumps({**whole, key: "HERE"}).replace('"HERE"', value) + "\n"


VALUES = (BIG, "1e300", "-9e10")
FIGURES = (
    *[("status.json", A_STATUS, key) for key in ("updated", "started", "ended", "price_h", "spent_before")],
    *[("status.json", A_STATUS, key) for key in ("exit_code", "failed_rank", "cause", "measured_step_s")],
    *[("metrics.jsonl", A_STEP, key) for key in ("step", "total_steps", "loss", "step_s", "validation_loss")],
    *[("starts.jsonl", {"at": 1.0, "command": "fab"}, key) for key in ("at", "hosts")],
)


def test_whatever_number_a_head_writes_its_runs_are_listed(tmp_path, capsys):
    ids = []
    for case, (value, (name, whole, key)) in enumerate(product(VALUES, FIGURES)):
        ids.append(f"tiny-20260131-15{case // 60:02d}{case % 60:02d}")
        folder = make_run(tmp_path, ids[-1])
        (folder / name).write_text(with_value({**whole, "run_id": ids[-1]}, key, value))
        read_starts(folder)
    found = runs.all_runs(HereHead(tmp_path))
    runs_table(found)
    assert sorted(seen.run_id for seen in found) == ids and all(name in capsys.readouterr().out for name in ids[-1:])
    ours = status.merged_rows(status.on_laptop(tmp_path), {})
    assert {line[0] for line in status.row_lines(ours)} == {status.row_values(row)["run"] for row in ours} == {*ids}
    at_risk.at_stake(HereHead(tmp_path), tmp_path / "home")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100, "9" * 10_000])
def test_json_without_bounds_is_a_fault_of_its_run(tmp_path, text):
    make_run(tmp_path, NEW)
    (tmp_path / NEW / "status.json").write_text(text)
    (tmp_path / NEW / "checkpoints" / f"step-{'9' * 200}").mkdir(parents=True)
    (seen,) = runs.all_runs(HereHead(tmp_path))
    assert (seen.status, seen.fault.split(" (")[0]) == (None, "its status.json cannot be read")
    assert status.on_laptop(tmp_path)[NEW].steps == ()
    with pytest.raises(ValueError, match=r"nested|digits"):
        bounded_json(text)


def test_what_a_heads_shell_says_of_sizes_and_times_is_a_figure_or_nothing():
    assert [figure_in(text) for text in ("12", "1700000000.25", BIG, "inf", "-1", "1e9", "١")] == [
        12,
        1700000000.25,
        *[0] * 5,
    ]


@pytest.mark.parametrize("name", [f"{NEW}\n", f"{NEW}\n\n", "tiny-２０260131-154500", f" {NEW}"])
def test_a_run_id_has_nothing_behind_its_time(name):
    assert not is_run_id(name)


def test_odd_numbers_of_a_node_are_no_answers():
    assert since("7260\n") == "up 2 h 01 min" and since(BIG) == BIG and since("²") == "²"
    assert parse_notices(["[" * 100_000, '{"node": 1}', "null"]) == []
