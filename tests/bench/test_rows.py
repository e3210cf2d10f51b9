"""The benchmark's rows: what fails costs itself, says so, and is counted at the end."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.rows import CommandFailed, Group, checked, measure, show

ROOT = Path(__file__).parents[2]
ROW = {"ours": 1.0, "peer": 2.0, "ratio": 2.0, "unit": "s", "runs": 1}


def group(*names, seen=None, broken=(), getting_ready="", clearing_up=""):
    """Rows without a measurement; `seen` is called as each is taken."""

    def take(name):
        if seen:
            seen(name)
        if name in broken:
            checked(subprocess.run([sys.executable, "-c", "import sys; sys.exit('no steps to learn from')"], text=True))
        return ROW

    @contextmanager
    def ready(folder):
        assert folder.is_dir()
        if getting_ready:
            raise RuntimeError(getting_ready)
        yield {name: lambda name=name: take(name) for name in names}
        if clearing_up:
            raise RuntimeError(clearing_up)

    return Group(names, ready)


def test_a_row_that_fails_costs_one_row_and_the_others_are_measured(tmp_path):
    groups = [group("a", "b", "c", broken=["b"]), group("d")]
    results = measure(groups, [], tmp_path / "bench.json")
    assert [(row["name"], row.get("ratio")) for row in results] == [("a", 2.0), ("b", None), ("c", 2.0), ("d", 2.0)]
    assert "ended with 1" in results[1]["failed"]
    assert json.loads((tmp_path / "bench.json").read_text()) == results


def test_the_file_holds_every_row_before_the_next_is_measured(tmp_path):
    out, written = tmp_path / "bench.json", []
    out.write_text('[{"name": "of yesterday"}]')

    def seen(name):
        written.append([row["name"] for row in json.loads(out.read_text())] if out.exists() else [])

    measure([group("a", "b", seen=seen), group("c", seen=seen)], [], out)
    assert written == [[], ["a"], ["a", "b"]]


def test_ground_that_cannot_be_made_ready_costs_its_own_rows(tmp_path):
    groups = [group("a", "b", getting_ready="no hosts"), group("c")]
    results = measure(groups, [], tmp_path / "bench.json")
    assert [row.get("failed") for row in results] == ["RuntimeError: no hosts"] * 2 + [None]


def test_what_is_left_behind_is_a_failure_of_its_own(tmp_path):
    results = measure([group("a", clearing_up="hosts are left")], [], tmp_path / "bench.json")
    assert results[0]["ratio"] == 2.0
    assert results[1]["name"] == "clearing up after a" and "hosts are left" in results[1]["failed"]


def test_only_named_rows_are_measured_and_nothing_is_made_ready_for_the_others(tmp_path):
    groups = [group("a", "b"), group("c", getting_ready="not asked for")]
    assert [row["name"] for row in measure(groups, ["b"], tmp_path / "bench.json")] == ["b"]


def test_a_command_that_fails_is_quoted_with_its_code():
    done = subprocess.run(["sh", "-c", "echo why; exit 3"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(CommandFailed, match=r"exit 3 ended with 3:\nwhy"):
        checked(done)


def test_the_table_shows_what_failed_beside_what_did_not(tmp_path, capsys):
    show(measure([group("a", "b", broken=["b"])], [], tmp_path / "bench.json"), "abc123")
    said = capsys.readouterr().out
    assert "failed: b: CommandFailed" in said and "abc123" in said


@pytest.mark.torch
def test_the_benchmark_names_its_rows_and_refuses_others():
    argv = [sys.executable, "-m", "tests.bench.run", "first_stp"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'first_stp'" in done.stderr and "rebuild_vs_fresh" in done.stderr
    assert not list(Path(ROOT).glob("bench.new"))
