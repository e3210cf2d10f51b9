"""A debugger on one rank while the others wait: with a real debugger client, on a real run of this machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.dap import Dap
from tests.support.supervised import status_of
from tests.support.waiting import until
from training.laptop import runs, tunnels
from training.laptop.base_model import TINY_CODE
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.models import tiny
from training.node.diagnosis.on_rank import collective_timeout_s
from training.node.diagnosis.progress import PATIENCE_S, debugged, read_progress
from training.node.heartbeat import late_ranks
from training.recipe.base import TINY
from training.run.environment import debug_env
from training.run.events import EVENTS, Ended, Started, Told, WaitingRank, row_of
from training.run.folder import METRICS
from training.run.launch import LaunchError
from training.text.files import ORIGIN, SUMS, sha256_of, sums_of, sums_text

ROOT = Path(__file__).parents[4]
pytest.importorskip("debugpy", reason="needs the [train] extra")


def line_of(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("x", "", False), "--debug-rank x: the number of a rank"),
        (("1", "", True), "leave --detach out"),
        (("", "0", False), "--profile 0: a number of steps"),
        (("", "12-10", False), "--profile 12-10"),
        (("", "three", False), "--profile three"),
    ],
)
def test_flags_that_cannot_be_are_refused_in_a_sentence(flags, words: str):
    with pytest.raises(LaunchError, match=re.escape(words)):
        tunnels.options(*flags)
    assert tunnels.options("0", "10-12", False) == {"debug_rank": 0, "profile": "10-12"}
    assert tunnels.options("", "", True) == {"debug_rank": None, "profile": ""}


def test_a_rank_that_there_is_not_cannot_be_debugged(tmp_path: Path):
    with pytest.raises(LaunchError, match="--debug-rank 2: there are ranks 0 to 1"):
        Session(HereHead(tmp_path), debug_rank=2).launch_of("tiny-20260101-000000", "")
    launch = Session(HereHead(tmp_path), debug_rank=1).launch_of("tiny-20260101-000000", "training.node.finetune")
    assert launch.debug_rank == 1 and launch.env["PYTHONBREAKPOINT"] == "debugpy.breakpoint"


def test_nobody_is_late_while_a_rank_stands_in_the_debugger():
    hours = 3 * 3600.0
    assert late_ranks({0: hours, 1: 10.0}, 2, 0, hours) == [1]
    assert late_ranks({0: hours, 1: 10.0}, 2, 0, hours, PATIENCE_S) == []
    assert late_ranks({0: hours}, 2, 0, hours, PATIENCE_S) == []
    assert debugged({"debug_rank": 0}) and not debugged({"debug_rank": None}) and not debugged({})


@pytest.mark.torch
@pytest.mark.parametrize(("debug_rank", "limit_s"), [(1, PATIENCE_S), (None, 30)])
def test_only_with_a_debugger_nothing_times_out_not_even_groups_made_later(
    tmp_path: Path, monkeypatch, debug_rank: int | None, limit_s: float
):
    torch = pytest.importorskip("torch", reason="needs the [train] extra")
    dist = torch.distributed
    from torch.distributed import distributed_c10d

    from training.node.rank import Rank
    from training.node.strategies import zero

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, timedelta(seconds=7))
    (tmp_path / "launch.json").write_text(json.dumps({"debug_rank": debug_rank}))
    rank = Rank(tmp_path)
    assert rank.heartbeat._limit_s == limit_s
    limit_s = PATIENCE_S if debug_rank else 1800
    assert collective_timeout_s(rank, 1800) == limit_s
    alone = partial(dist.init_process_group, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(zero, "join", lambda backend, timeout: alone(backend, timeout=timeout))
    zero.init_process_group(0, limit_s)
    try:
        later = dist.new_group()
        timeout = later._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=limit_s)
    finally:
        dist.destroy_process_group()


def test_an_older_start_of_the_run_does_not_hide_that_the_rank_has_not_come_yet(tmp_path: Path):
    run = tmp_path / "tiny-20260101-000000"
    (run / "logs").mkdir(parents=True)

    def waits_at() -> int | None:
        return tunnels.waits_at(runs.events(HereHead(tmp_path), run.name), 1)

    assert waits_at() is None
    told = [Told(1, Started(7)), Told(1, WaitingRank(5679)), Told(0, Started(8))]
    (run / EVENTS).write_text("".join(row_of(each, 0) for each in told))
    assert waits_at() == 5679
    with (run / EVENTS).open("a") as file:
        file.write(row_of(Told(1, Ended(1)), 0) + '{"at": 1, "rank": 1, "ev')
    assert waits_at() is None


LONE_RANK = """
import sys
from pathlib import Path
from types import SimpleNamespace
from training.node.diagnosis import on_rank
rank = SimpleNamespace(launch={"debug_rank": int(sys.argv[1])}, place=SimpleNamespace(rank=0, node="te1"))
on_rank.wait_for_debugger(rank)
answer = 41
breakpoint()
print("answer", answer, flush=True)
"""


def test_breakpoint_in_the_code_goes_to_the_debugger_and_elsewhere_does_nothing(tmp_path: Path):
    (tmp_path / "program.py").write_text(LONE_RANK)
    env = {**os.environ, **debug_env(), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(tmp_path / "program.py")]
    other = subprocess.run([*argv, "1"], env=env, capture_output=True, text=True, timeout=30)
    assert (other.returncode, other.stdout) == (0, "answer 41\n")
    program = subprocess.Popen([*argv, "0"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        said = program.stdout.readline()
        client = Dap(int(re.search(r"waits for a debugger at 127\.0\.0\.1:(\d+)", said)[1]))
        client.attach(str(tmp_path), str(tmp_path), {})
        thread = client.event("stopped")["threadId"]
        frame = client.top_frame(thread)
        assert frame["source"]["path"] == str(tmp_path / "program.py")
        client.ask("evaluate", expression="answer += 1", frameId=frame["id"], context="repl")
        client.ask("continue", threadId=thread)
        client.event("terminated")
        client.close()  # which ends the adapter, the other holder of the program's pipe
        assert program.communicate(timeout=30)[0].endswith("answer 42\n")
    finally:
        program.kill()
        program.wait()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a barely trained tiny model where `--here` looks for it."""
    pytest.importorskip("deepspeed", reason="needs the [train] extra")
    folder = tmp_path / ".cache" / "spotune" / "models" / "tiny"
    folder.mkdir(parents=True)
    tiny.write_model(folder, steps=1)
    (folder / SUMS).write_text(sums_text(sums_of(folder)))
    record = {"repo": str(TINY), "revision": "main", "commit": sha256_of(TINY_CODE), "hash": sha256_of(folder / SUMS)}
    (folder / ORIGIN).write_text(json.dumps(record))
    return tmp_path


@pytest.mark.torch
def test_a_real_run_stops_at_a_breakpoint_of_one_rank_the_other_waits_and_both_finish(home: Path):
    (home / "fabfile.py").write_text("from training.laptop.tasks import namespace\n")
    env = {**os.environ, "PYTHONPATH": programs.PATH, "HOME": str(home), "PYTHONUNBUFFERED": "1"}
    argv = [sys.executable, "-m", "fabric", "train", "--model", "tiny", "--here", "--steps", "3", "--debug-rank", "1"]
    argv += ["--profile", "2-3", "--set", "optimizer.warmup_steps=1"]
    fab = subprocess.Popen(argv, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(fab.stdout), daemon=True)
    try:
        reader.start()
        until(lambda: "}\n" in said)  # the end of what goes into launch.json
        text = "".join(said)
        configuration = json.loads(text[text.index("{\n") : text.index("\n}\n") + 2])
        assert "rank 1 on localhost waits for a debugger" in text
        mapping = configuration["pathMappings"][0]
        assert mapping["localRoot"] == str(ROOT / "training")
        run = Path(mapping["remoteRoot"]).parent
        finetune = ROOT / "training" / "node" / "finetune.py"
        line = line_of(finetune, "progress.step += 1")

        client = Dap(configuration["connect"]["port"])
        assert client.attach(mapping["localRoot"], mapping["remoteRoot"], {str(finetune): [line]}) == [line]
        thread = client.event("stopped", 90)["threadId"]
        frame = client.top_frame(thread)
        assert (frame["source"]["path"], frame["line"]) == (str(finetune), line)
        evaluated = client.ask("evaluate", expression="(run.rank.place.rank, progress.step)", frameId=frame["id"])
        assert evaluated["result"] == "(1, 0)"
        refreshed = status_of(run).updated
        until(lambda: status_of(run).updated != refreshed, "the supervisor's next look")
        assert read_progress(run, 0).step <= 1 and len((run / METRICS).read_text().splitlines()) <= 1
        assert fab.poll() is None
        client.ask("setBreakpoints", source={"path": str(finetune)}, breakpoints=[])
        client.ask("continue", threadId=thread)
        assert fab.wait(60) == 0, "".join(said)
        assert [json.loads(row)["step"] for row in (run / METRICS).read_text().splitlines()] == [1, 2, 3]
        with gzip.open(run / "profile" / "trace.json.gz", "rt") as file:  # there before fab train comes back
            steps = [e for e in json.load(file)["traceEvents"] if e["name"].startswith("ProfilerStep#")]
        assert sorted(event["pid"] for event in steps) == [0, 0, 1, 1]
        client.close()
    finally:
        fab.kill()
        fab.wait()
