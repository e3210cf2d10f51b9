"""Between the plan and the run: what a start asks of the head, and what it leaves when it does not come to one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoke import Context, Exit

from tests.support.heads import cluster_of
from tests.support.llama_shape import model_shape
from tests.support.waiting import until
from tests.training.plan.test_calibration import A10S, SWEEP
from training.cost.shape import PlanError
from training.data.readers import records
from training.data.sample import Bad, DataError
from training.laptop import base_model, follow, new_run, preparing, runs, start_lock, start_run, status, workload
from training.laptop.head_node import Head, HeadError, HereHead, RemoteHead
from training.laptop.new_run import pack
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session, launch_here
from training.laptop.preparing import DataRequest
from training.laptop.tasks import train
from training.models.names import load_recipe
from training.node.prepare import raw_data
from training.node.supervision.failure import rank_end
from training.node.supervision.launcher_output import Log, pass_on
from training.run.events import Ended
from training.run.folder import CLAIM, PREPARING, Status, begun, new_run_id, status_text
from training.run.launch import STOP_GRACE_S, Host, Launch, LaunchError, parse_launch

ROOT = Path(__file__).parents[3]
RUN = "tiny-20260131-154500"
REPORT = {
    "shape": "messages",
    "records": 400,
    "bad": 0,
    "empty": 0,
    "truncated": 0,
    "samples": 400,
    "tokens": 24_000,
    "learned_tokens": 9_000,
    "rows": 139,
    "longest": 120,
    "template": True,
    "end_of_turn": "<|im_end|>",
    "end_of_turn_id": 2,
    "end_of_turn_learned": True,
    "pad_id": 0,
    "eos_id": 2,
}
CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 2048,
    "eos_token_id": 2,
}
PREPARED = {
    "report": REPORT,
    "model": CONFIG,
    "generation": {},
    "outline": model_shape(CONFIG).to_outline(),
    "disk_free_gib": 100.0,
}


def launch(folder: Path, python: str = sys.executable, **env: str) -> Launch:
    here = (Host("localhost", "127.0.0.1", 2),)
    return Launch(RUN, str(folder), here, "training.node.finetune", (), python, env, models=str(folder), here=True)


def python_that(folder: Path, does: str) -> str:
    """A stand-in for the head's Python; it gets `-m training.node.prepare --run FOLDER ...`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / RUN
    (folder / "logs").mkdir(parents=True)
    return folder


def test_the_report_is_the_last_line_whatever_was_said_before(run: Path, tmp_path: Path):
    python = python_that(tmp_path, "echo noise; echo trouble >&2; echo '{\"report\": 1}'")
    assert preparing.prepare(HereHead(run.parent), launch(run, python), DataRequest()) == {"report": 1}
    assert (run / "logs" / "prepare.log").read_text() == "trouble\n"


@pytest.mark.parametrize("code", [1, 2, 137])
def test_a_preparation_that_fails_without_a_sentence_of_its_own_has_its_last_words(
    run: Path, tmp_path: Path, code: int
):
    python = python_that(tmp_path, f"echo 'line 3: not JSON' >&2; exit {code}")
    with pytest.raises(HeadError, match=r"line 3: not JSON$"):
        preparing.prepare(HereHead(run.parent), launch(run, python), DataRequest())


def test_unusable_data_are_the_users_mistake_without_what_libraries_warn_of(run: Path, tmp_path: Path):
    (run / "recipe.toml").write_text("nothing = 1")
    warns = "import sys, warnings; warnings.warn('of a library'); from training.node.prepare import main; main()"
    python = python_that(tmp_path, f'shift 2; exec {sys.executable} -c "{warns}" "$@"')
    with pytest.raises(DataError) as refused:
        preparing.prepare(HereHead(run.parent), launch(run, python, PYTHONPATH=str(ROOT)), DataRequest())
    assert refused.value.exit_code == 2
    assert all(line.startswith(f"{run}/recipe.toml: ") for line in str(refused.value).splitlines())


def test_the_head_prepares_in_the_ranks_environment_without_the_runs_mark(run: Path, tmp_path: Path):
    python = python_that(
        tmp_path, 'printf \'{"is": ["%s", "%s", "%s", "%s"]}\' "$SPOTUNE_RUN" "$HF_HUB_OFFLINE" "$A" "$*"'
    )
    marked = launch(run, python, SPOTUNE_RUN=str(run), HF_HUB_OFFLINE="1", A="b c")
    said = preparing.prepare(HereHead(run.parent), marked, DataRequest(skip_bad=True))
    assert said["is"] == ["", "1", "b c", f"-m training.node.prepare --run {run} --attached --skip-bad"]


def test_data_of_the_hub_are_fetched_from_the_endpoint_that_is_set_here(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    python = python_that(tmp_path, 'printf \'{"is": ["%s", "%s"]}\' "$HF_HUB_OFFLINE" "$HF_ENDPOINT"')
    offline = launch(run, python, HF_HUB_OFFLINE="1")
    prepared = preparing.prepare(HereHead(run.parent), offline, DataRequest(from_hub=True))
    assert prepared == {"is": ["", "http://mirror"]}


@pytest.fixture(params=["here", "over ssh"])
def head(request: pytest.FixtureRequest, run: Path) -> Iterator[Head]:
    if request.param == "here":
        yield HereHead(run.parent)
        return
    with closing(RemoteHead(request.getfixturevalue("node"))) as far:
        yield far


def test_ctrl_c_while_the_data_are_prepared_ends_the_program_on_the_head(head: Head, run: Path):
    os.mkfifo(run / "recipe.toml")  # whoever opens it waits, as over data that take hours

    def interrupt() -> None:
        until(lambda: preparing_now(run), "the program")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        preparing.prepare(head, launch(run, PYTHONPATH=str(ROOT)), DataRequest())
    until(lambda: not preparing_now(run), "the end of a program that nobody waits for")


def preparing_now(run: Path) -> list[str]:
    """Python processes that prepare this run."""
    wanted = f"{sys.executable} -m training.node.prepare --run {run} "
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [words] if words.startswith(wanted) else []
    return found


def test_the_networks_speed_is_measured_else_promised_else_unknown(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts = (Host("te1", "10.0.0.1", 1), Host("te2", "10.0.0.2", 1))
    two = Launch(RUN, "/data/runs/x", hosts, "training.node.finetune", (), "python", {})
    head = HereHead(tmp_path)
    assert preparing.measured_speeds(cluster_of(head), two, A10S).bytes_per_s is None
    assert preparing.measured_speeds(cluster_of(head, line_rate_gbps=16), two, A10S).bytes_per_s == pytest.approx(1.7e9)
    check = {"run_id": "check-1", "time": 1.0, "backend": "nccl", "world_size": 2, "cluster": "mine", "nodes": []}
    check |= {"checks": [], "pairs": [], "sweep": [SWEEP]}
    folder = tmp_path / "runs" / "check-20260101-000000"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(check))
    assert preparing.measured_speeds(cluster_of(head, line_rate_gbps=16), two, A10S).bytes_per_s == 1.25e9
    assert preparing.measured_speeds(cluster_of(head, name="another"), two, A10S).bytes_per_s is None


class Recorded(HereHead):
    """This machine, with the start of the supervisor only noted."""

    started: Launch | None = None

    def start_early(self, launch: Launch) -> None:
        """Nothing waits."""

    def start(self, launch: Launch, *, early: bool = False) -> None:
        self.started = launch


def sh(command: str) -> str:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout


MOMENT = datetime(2026, 1, 31, 15, 45, tzinfo=UTC)


def start(head: HereHead, monkeypatch, answer: Any, preparation: Any = None, **wishes: bool) -> str | None:
    """A start of `tiny` whose preparation gives `answer`, or raises it."""

    def prepare(*_: object) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(base_model, "here_base_model", lambda recipe, target: "0" * 64)
    monkeypatch.setattr(preparing, "prepare", preparation or prepare)
    recipe = load_recipe("tiny")
    with new_run.checked_data(recipe) as given:
        return start_run.start(Session(head), start_run.StartRequest(recipe, given, **wishes), MOMENT)


def test_a_sound_run_starts_with_its_plan_and_is_no_longer_marked(tmp_path: Path, monkeypatch, capsys):
    head = Recorded(tmp_path / "runs")
    assert start(head, monkeypatch, PREPARED) == RUN
    assert head.started and head.started.run_id == RUN
    folder = head.runs / RUN
    assert not (folder / PREPARING).exists()
    shipped = parse_launch((folder / "launch.json").read_text())
    assert shipped == head.started and shipped.stop_grace_s == STOP_GRACE_S
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["data"]["records"] == 400 and plan["base_model_hash"] == "0" * 64
    assert {"memory_gib", "step_s", "minutes", "tokens_per_step", "total_steps", "parts"} <= plan["predicted"].keys()
    said = capsys.readouterr().out
    assert "ok      records: 400 to learn from" in said and "error" not in said
    assert "more checks passed; --dry shows all of them\n" in said and "ok      dtype" not in said


def test_dry_shows_the_table_and_leaves_nothing(tmp_path: Path, monkeypatch, capsys):
    head = Recorded(tmp_path / "runs")
    assert start(head, monkeypatch, PREPARED, dry=True) == ""
    assert head.started is None and list(head.runs.iterdir()) == []
    *checks, verdict = capsys.readouterr().out.splitlines()
    assert "ok      dtype: bfloat16" in checks and "--dry" in verdict.split()


def test_ctrl_c_before_a_start_speaks_of_no_run(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.laptop.start_run.recipe_with", interrupted)
    with pytest.raises(Exit) as ended:
        train.body(Context(), model="tiny")
    assert ended.value.code == 130 and "started" not in ended.value.message


BAD = {**PREPARED, "report": {**REPORT, "samples": 15}}


@pytest.mark.parametrize("answer", [BAD, DataError("bad"), HeadError("gone"), KeyboardInterrupt()])
def test_a_start_that_does_not_come_to_a_run_leaves_nothing(tmp_path: Path, monkeypatch, capsys, answer: Any):
    head = Recorded(tmp_path / "runs")
    with pytest.raises(PlanError if isinstance(answer, dict) else type(answer)):
        start(head, monkeypatch, answer)
    assert head.started is None and list(head.runs.iterdir()) == []
    assert ("nothing was started" in capsys.readouterr().out) == isinstance(answer, KeyboardInterrupt)


def test_anyway_starts_in_spite_of_an_estimate(tmp_path: Path, monkeypatch):
    head = Recorded(tmp_path / "runs")
    assert start(head, monkeypatch, BAD, anyway=True) == RUN
    assert head.started


LEFT, DONE, ODD = (f"{name}-20260101-000000" for name in ("left", "done", "odd"))


def test_what_an_interrupted_start_left_is_removed_by_the_next_and_nothing_else_is(tmp_path: Path, monkeypatch):
    head = Recorded(tmp_path / "some runs' folder")
    for name, files in ((LEFT, [PREPARING]), (DONE, ["status.json"]), (ODD, [PREPARING, "status.json"])):
        (head.runs / name).mkdir(parents=True)
        for file in files:
            (head.runs / name / file).touch()
    start(head, monkeypatch, PREPARED)
    assert sorted(path.name for path in head.runs.iterdir()) == [DONE, ODD, RUN]


def test_two_starts_at_once_are_one_and_the_second_spoils_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start_lock, "LOCK_WAIT_S", 0.1)
    head, prepares, go_on = Recorded(tmp_path / "runs"), threading.Event(), threading.Event()

    def prepare(*_: object) -> Any:
        prepares.set()
        assert go_on.wait(60)
        return PREPARED

    first: list[str | None] = []
    worker = threading.Thread(target=lambda: first.append(start(head, monkeypatch, PREPARED, prepare)))
    worker.start()
    assert prepares.wait(60)
    for dry in (True, False):
        with pytest.raises(LaunchError, match=rf"^{RUN} is being started on this machine; wait for it"):
            start(head, monkeypatch, PREPARED, prepare, dry=dry)
    with pytest.raises(LaunchError, match="is being started"):
        preparing.start_check(Session(head), MOMENT)
    with pytest.raises(LaunchError, match="is being started"):
        start_lock.refuse_second(head)
    assert runs.running_or_starting(head) == RUN and (head.runs / RUN / "recipe.toml").exists()
    go_on.set()
    worker.join(60)
    assert first == [RUN] and head.started and runs.running_or_starting(head) == ""
    assert [path.name for path in head.runs.iterdir()] == [RUN]


def test_a_start_counts_for_down_and_snapshots(tmp_path: Path, monkeypatch):
    from inventory.cloud.errors import RentError

    head = HereHead(tmp_path / "runs")
    te1 = SimpleNamespace(name="te1")
    monkeypatch.setattr("training.laptop.head_node.RemoteHead", lambda *_: head)
    monkeypatch.setattr("inventory.cluster.load_cluster", lambda: SimpleNamespace(head=te1))
    assert workload._asked_head()[0].active == ""
    workload.TrainingWorkload().end_all(te1, stop_run=False)
    with start_lock.hold_start_lock(head), new_run.new_run_folder(head, "tiny", MOMENT) as run_id:
        assert workload._asked_head()[0].active == run_id == RUN
        with pytest.raises(RentError, match=f"{RUN} is being started"):
            workload.TrainingWorkload().end_all(te1, stop_run=True)
    assert workload._asked_head()[0].active == ""


def test_a_run_id_belongs_to_whoever_made_its_folder_and_a_clean_up_removes_only_that(tmp_path: Path):
    head = HereHead(tmp_path / "it's runs")
    head.make_runs()
    new = partial(new_run.new_run_folder, head, "tiny", MOMENT)
    with new() as first, new() as second:
        assert (first, second) == (RUN, "tiny-20260131-154501")
        (head.runs / second / PREPARING).write_text("another's\n")
    assert [path.name for path in head.runs.iterdir()] == [second], "another's"
    with new() as first:
        head.ask(fs.rename, head.runs / first / PREPARING, head.runs / first / CLAIM)
    assert (head.runs / first).exists(), "a run that is ready is no start any more"


def test_a_start_that_was_killed_leaves_the_turn_to_the_next(tmp_path: Path):
    code = (
        "import signal, sys; from pathlib import Path; from training.laptop import start_lock\n"
        "from training.laptop.head_node import HereHead\n"
        "with start_lock.hold_start_lock(HereHead(Path(sys.argv[1]))): print(1, flush=True); signal.pause()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as other:
        assert other.stdout and other.stdout.readline()
        assert runs.under_way(HereHead(tmp_path)) == "a run"
        other.kill()
    with start_lock.hold_start_lock(HereHead(tmp_path)) as mine:
        mine.refuse_lost()


def test_the_turn_needs_no_program_but_a_shell(tmp_path: Path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sh").symlink_to(str(shutil.which("sh")))
    head = HereHead(tmp_path)
    monkeypatch.setenv("PATH", str(tools))
    assert runs.under_way(head) == ""
    with start_lock.hold_start_lock(head) as mine:
        mine.refuse_lost()
        assert runs.under_way(head) == "a run"


def test_who_looks_at_the_turn_is_in_nobodys_way_who_looks_too(tmp_path: Path):
    onlooker = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(onlooker, fcntl.LOCK_SH)
        assert runs.under_way(HereHead(tmp_path)) == ""
    finally:
        os.close(onlooker)


def test_a_turn_that_cannot_be_looked_at_is_not_taken_for_free(tmp_path: Path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(HeadError):
        runs.under_way(HereHead(tmp_path))


def test_no_ranks_are_started_on_another_system_than_linux(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(LaunchError):
        launch_here(tmp_path, "training.node.finetune", "/usr/bin", tmp_path)


def test_a_lost_connection_gives_the_turn_to_the_next(tmp_path: Path, node, monkeypatch):
    def far() -> RemoteHead:
        head = RemoteHead(node)
        head.runs = tmp_path
        monkeypatch.setattr(head, "make_runs", lambda: None)
        return head

    with closing(far()) as one, closing(far()) as other:
        with pytest.raises(HeadError, match=r"^te1 has not heard"), start_lock.hold_start_lock(one) as mine:
            with pytest.raises(LaunchError, match=r"^a run is being started on te1"), start_lock.hold_start_lock(other):
                pytest.fail("two have the turn")
            mine.refuse_lost()
            one.close()
            with start_lock.hold_start_lock(other) as theirs:
                theirs.refuse_lost()
            mine.refuse_lost()


def test_a_start_that_the_head_heard_nothing_of_starts_nothing_any_more(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start_lock, "SILENCE_S", 1)
    head = Recorded(tmp_path / "runs")

    def prepare(*_: object) -> Any:
        until(lambda: not runs.under_way(head), "a turn that ends")
        return PREPARED

    with pytest.raises(HeadError, match="has given it up: nothing was started"):
        start(head, monkeypatch, PREPARED, prepare)
    assert head.started is None and list(head.runs.iterdir()) == []


@pytest.mark.proof  # the clock is that of a program of the shell: seconds
def test_a_start_that_beats_keeps_the_turn_beyond_the_silence(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start_lock, "SILENCE_S", 4)
    monkeypatch.setattr(start_lock, "BEAT_S", 0.1)
    head, beats, send = Recorded(tmp_path / "runs"), [], start_lock.StartLock._send
    monkeypatch.setattr(start_lock.StartLock, "_send", lambda turn, word: beats.append(word) or send(turn, word))

    def prepare(*_: object) -> Any:
        until(lambda: len(beats) > start_lock.SILENCE_S / start_lock.BEAT_S, "beats for longer than the silence")
        return PREPARED

    assert start(head, monkeypatch, PREPARED, prepare) == RUN


def test_what_is_shipped_carries_its_times(tmp_path: Path):
    (tmp_path / "a").write_text("a")
    os.utime(tmp_path / "a", (1e9, 1e9))
    began = time.time()
    pack({"a": tmp_path / "a", "b": "text"}, tmp_path / "tar.gz")
    HereHead(tmp_path).put(tmp_path / "tar.gz", tmp_path / "there")
    assert (tmp_path / "there" / "a").stat().st_mtime == 1e9
    assert int(began) <= (tmp_path / "there" / "b").stat().st_mtime <= time.time()


def test_run_ids_are_in_utc_wherever_the_laptop_is():
    shanghai = datetime(2026, 1, 31, 23, 45, tzinfo=timezone(timedelta(hours=8)))
    assert new_run_id("tiny", shanghai) == RUN
    assert begun(RUN) == shanghai.timestamp() and begun("tiny-20269999-999999") == begun("x") == 0


def test_files_and_folders_keep_their_kind_and_the_hubs_go_by_name(tmp_path: Path):
    recipe = load_recipe("tiny")
    line = '{"prompt": "a", "completion": "b"}\n'
    (tmp_path / "some" / "inner").mkdir(parents=True)
    for name in ("some/a.jsonl", "some/inner/b.jsonl", "one.JSONL"):
        (tmp_path / name).write_text(line)
    one = new_run.training_data(recipe, (str(tmp_path / "one.JSONL"),), tmp_path)
    assert list(one.files) == ["data/train.jsonl"] and one.summary and one.summary.records == 1
    many = new_run.training_data(recipe, (str(tmp_path / "some"),), tmp_path)
    assert sorted(many.files) == ["data/train/a.jsonl", "data/train/inner/b.jsonl"]
    hub = new_run.training_data(recipe, ("owner/name",), tmp_path)
    assert hub.files == {"data/train.hub": "owner/name"} and hub.from_hub and hub.summary is None
    (tmp_path / "bad.jsonl").write_text(line + "{}\n")
    with pytest.raises(DataError):
        new_run.training_data(recipe, (str(tmp_path / "bad.jsonl"),), tmp_path)
    skipped = new_run.training_data(recipe, (str(tmp_path / "bad.jsonl"),), tmp_path, skip_bad=True)
    assert skipped.summary and (skipped.summary.records, skipped.summary.bad) == (1, 1)


def test_several_files_and_folders_are_one_run_in_the_order_given(tmp_path: Path):
    (tmp_path / "b").mkdir()
    for name, answers in (("b/x.jsonl", "12"), ("a.jsonl", "3"), ("c/a.jsonl", "4")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(f'{{"prompt": "a", "completion": "{each}"}}\n' for each in answers))
    given = [str(tmp_path / name) for name in ("b", "a.jsonl", "c/a.jsonl")]
    found = new_run.training_data(load_recipe("tiny"), given, tmp_path)
    assert found.summary and found.summary.records == 4
    for place, file in found.files.items():
        (tmp_path / "run" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / place).write_bytes(Path(file).read_bytes())
    shipped = records(raw_data(tmp_path / "run" / "data", tmp_path), Bad(False))
    assert [record.completion for _, record in shipped] == ["1", "2", "3", "4"]
    assert found.data is not None
    assert [record.completion for _, record in records(found.data, Bad(False))] == ["1", "2", "3", "4"]


def test_of_several_none_is_there_twice_missing_or_of_the_hub(tmp_path: Path):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    for other, said in ((str(tmp_path / "in"), "given twice"), ("no.jsonl", "no such file"), ("o/n", "taken alone")):
        with pytest.raises(DataError, match=said):
            new_run.training_data(load_recipe("tiny"), (str(file), other), tmp_path)


def test_bad_records_come_with_what_can_be_done_and_those_alone_without_leaving_them_out(tmp_path: Path):
    (file := tmp_path / "a.jsonl").write_text("{}\n" * 5)
    with pytest.raises(DataError) as refusal:
        new_run.training_data(load_recipe("tiny"), (str(file),), tmp_path)
    assert str(refusal.value).startswith("5 records: none of messages, ")
    assert str(refusal.value).endswith(" lines 1, 2, 3, ...)\n5 bad records: there are no others; fix them")
    file.write_text('{}\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"\n1 bad record: fix them, or skip them with --skip-bad$"):
        new_run.training_data(load_recipe("tiny"), (str(file),), tmp_path)


NAMED = {
    ("a.jsonl",): ["a.jsonl"],
    ("c",): ["c/a.jsonl", "c/in/x.jsonl"],
    ("a.jsonl", "b/x.jsonl", "c"): ["{here}/a.jsonl", "b/x.jsonl", "c/a.jsonl", "c/in/x.jsonl"],
    ("a.jsonl", "b/a.jsonl", "b/x.jsonl"): ["{here}/a.jsonl", "b/a.jsonl", "x.jsonl"],
    ("c", "b/a.jsonl"): ["c/a.jsonl", "c/in/x.jsonl", "b/a.jsonl"],
}


@pytest.mark.parametrize("given", NAMED)
def test_the_head_calls_files_as_their_user_does_and_knows_no_more_of_his_folders_than_tells_them_apart(
    tmp_path: Path, given: tuple[str, ...]
):
    for name in ("a.jsonl", "b/x.jsonl", "b/a.jsonl", "c/a.jsonl", "c/in/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    found = new_run.training_data(load_recipe("tiny"), [str(tmp_path / name) for name in given], tmp_path)
    for place, file in found.shipped.items():
        (tmp_path / "run" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / place).write_text(file if isinstance(file, str) else file.read_text())
    data = raw_data(tmp_path / "run" / "data", tmp_path)
    assert [file.name for file in data.files] == [name.format(here=tmp_path.name) for name in NAMED[given]]


def test_a_run_out_of_gpu_memory_ends_with_the_ladder_of_its_own_recipe(tmp_path: Path, monkeypatch, capsys):
    head = Recorded(tmp_path / "runs")
    big = {**CONFIG, "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
    start(head, monkeypatch, PREPARED | {"model": big, "outline": model_shape(big).to_outline()}, anyway=True)
    _, cause, words = rank_end(Ended(1), None, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"])
    (head.runs / RUN / "status.json").write_text(status_text(Status(RUN, "failed", f"rank 0 on te1 {words}", cause)))
    capsys.readouterr()
    with pytest.raises(follow.RunFailed, match="ran out of GPU memory"):
        follow.print_outcome(head, RUN, runs.look(head, RUN))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("planned: ")
    assert lines[1].startswith("  --set micro_batch=1: ") and "iB less" in lines[1]


@pytest.mark.parametrize("broken", ["recipe.toml", "plan.json"])
def test_without_its_papers_a_failed_run_has_no_ladder(tmp_path: Path, monkeypatch, broken: str):
    head = Recorded(tmp_path / "runs")
    start(head, monkeypatch, PREPARED)
    assert follow.memory_ladder(head, RUN)
    (head.runs / RUN / broken).write_text("{")
    assert follow.memory_ladder(head, RUN) == []


NCCL = """\
te1: [0] te1:4021:4021 [0] NCCL INFO Bootstrap : Using eth1:10.0.0.11<0>
te1: [0] NCCL version 2.19.3+cuda12.3
te1: [0] te1:4021:4060 [0] NCCL INFO comm 0x55f90c rank 0 nranks 2 cudaDev 0 busId 30 commId 0x795b - Init START
te1: [0] te1:4021:4060 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
te1: [0] te1:4021:4060 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
te2: [1] epoch 1 loss 2.4
te2: [1] te2:377:400 [0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer te1<56938>
"""
"""Two nodes over plain TCP, as NCCL 2.19 writes it (NVIDIA/nccl #1267, #952), through DeepSpeed's launcher."""


def test_what_nccl_logged_of_its_network_is_told_once(run: Path, capsys):
    (run / "logs" / "launcher.log").write_text(NCCL)
    cluster = cluster_of(HereHead(run.parent))
    status.show_log(cluster, RUN, status.LogPart.FACTS)
    counts = {line.strip() for line in capsys.readouterr().out.strip().splitlines()}
    assert counts == {
        "2 NCCL INFO Channel via NET/Socket/0",
        "1 NCCL INFO Bootstrap : Using eth1:10.0.0.11<0>",
        "1 NCCL version 2.19.3+cuda12.3",
        "1 NCCL WARN socketProgress: Connection closed by remote peer te1<56938>",
    }
    (run / "logs" / "launcher.log").unlink()
    status.show_log(cluster, RUN, status.LogPart.FACTS)
    assert capsys.readouterr().out.strip() == status.NO_NCCL


EARLIER = b"te1: [0] Traceback (most recent call last):\nte1: [0] OSError: earlier\n"
WROTE = """\
[2026-11-28 17:33:12,706] [INFO] [multinode_runner.py:95:get_cmd] Running on the following workers: te1,te2
te2: [2026-11-28 17:33:17,121] [INFO] [launch.py:170:main] dist_world_size=2
te2: [1] @{"event": "started", "pid": 10661}
te2: [1] transformers/modeling_utils.py:3303: FutureWarning: `is_gradient_checkpointing` is deprecated
te2: [1]   warnings.warn(
te2: [1] transformers/modeling_utils.py:3303: FutureWarning: `is_gradient_checkpointing` is deprecated
te2: [1]   warnings.warn(
te1: [0] transformers/modeling_utils.py:3303: FutureWarning: `is_gradient_checkpointing` is deprecated
te1: [0]   warnings.warn(
te1: [0] te1:4021:4021 [0] NCCL INFO Bootstrap : Using eth1:10.0.0.11<0>
te1: [0] step 1/2  loss 5.8590
te1: [0] [rank0]: Traceback (most recent call last):
te2: [1] [rank1]: Traceback (most recent call last):
te1: [0] [rank0]:     return forward(
te1: [0] [rank0]:     ^^^^^^^^^^^^^^^
te2: [1] [rank1]:     return forward(
te2: [1] [rank1]:     ^^^^^^^^^^^^^^^
te1: [0] [rank0]:     return forward(
te1: [0] [rank0]:     ^^^^^^^^^^^^^^^
te2: [1] [rank1]:     return forward(
te2: [1] [rank1]:     ^^^^^^^^^^^^^^^
te3: [2] [rank2]: Traceback (most recent call last):
te2: [1] [rank1]: ValueError: only here
te3: [2] [rank2]:     return backward(
pdsh@te1: te1: ssh exited with exit code 70
"""


def test_a_log_shows_once_what_the_ranks_wrote_since_the_last_start(run: Path, capsys):
    """The lines of a stack stay together, where a rank wrote one of them twice and where ranks wrote at once."""
    for output in (EARLIER, WROTE.encode()):
        pass_on(io.BytesIO(output), Log(run / "logs" / "launcher.log"), queue.Queue(), threading.Event())
    cluster, lines = cluster_of(HereHead(run.parent)), WROTE.splitlines()
    status.show_log(cluster, RUN, status.LogPart.OWN)
    assert capsys.readouterr().out.splitlines()[:-1] == [
        lines[number] for number in (3, 4, 10, 11, 13, 14, 17, 18, 21, 23, 22, 24)
    ]
    status.show_log(cluster, RUN, status.LogPart.EVERY)
    everything = capsys.readouterr().out
    assert all(line in everything for line in (*EARLIER.decode().splitlines(), *lines))
