"""The training tasks as a user types them: mistakes are one sentence and code 2, before anything starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from inventory.cluster import Cluster
from inventory.nodes import Node
from inventory.settings import Network, Settings
from tests.support import programs
from tests.support.checkpoints import with_checkpoint
from tests.support.run_folders import going_on
from tests.support.waiting import until
from training.laptop import fetch, open_cluster
from training.laptop.head_node import HereHead
from training.models.names import load_recipe
from training.recipe.reading import with_changes
from training.run.launch import Host, Launch, launch_text
from training.text.files import PARTS, sums_of, sums_text

ROOT = Path(__file__).parents[3]
FABFILE = "from training.laptop.tasks import namespace\n"


def fab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run fab with the training tasks alone, in a folder of its own."""
    (folder / "fabfile.py").write_text(FABFILE)
    env = {**os.environ, "PYTHONPATH": programs.PATH, "SPOTUNE_CLUSTER": str(folder / "cluster.toml")}
    return subprocess.run(
        [sys.executable, "-m", "fabric", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_an_unknown_model_is_told_where_the_known_ones_are(tmp_path: Path):
    said = refused(fab(tmp_path, "train", "--model", "gpt-5"))
    assert "unknown model 'gpt-5'" in said and "fab models lists all " in said


def test_two_parts_of_a_log_at_once_are_refused_by_their_flags(tmp_path: Path):
    assert {"--facts", "--follow"} <= {
        *refused(fab(tmp_path, "logs", "--here", "--facts", "--follow")).replace(":", "").split()
    }


def test_no_model_is_told_where_the_known_ones_are(tmp_path: Path):
    assert "--model NAME; fab models lists all " in refused(fab(tmp_path, "train"))


def test_a_bad_data_line_is_named_with_its_number(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    done = fab(tmp_path, "train", "--model", "tiny", "--data", str(data))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    bad, cure = done.stderr.strip().splitlines()
    assert "data.jsonl line 2: " in bad and cure == "1 bad record: fix them, or skip them with --skip-bad"


def test_models_other_than_tiny_need_data(tmp_path: Path):
    assert "--data FILE" in refused(fab(tmp_path, "train", "--model", "qwen2.5-7b"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("steps", "key=value"),
        ("lora.rank＝8", "--set lora.rank＝8: ＝ is a full-width sign; write --set lora.rank=8"),
        ("lora.rnk=3", "did you mean"),
        ("lora.rank=x", "lora.rank"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, setting: str, words: str):
    assert words in refused(fab(tmp_path, "train", "--model", "tiny", "--set", setting))


def test_a_resumed_run_keeps_its_data_and_a_new_one_has_nothing_to_force(tmp_path: Path):
    assert "keeps its data" in refused(fab(tmp_path, "train", "--resume", "--data", "x.jsonl", "--here"))
    assert "--force is for --resume" in refused(fab(tmp_path, "train", "--model", "tiny", "--force", "--here"))


def test_a_resume_with_another_recipe_is_refused_and_all_that_differs_is_named(tmp_path: Path):
    run = make_run(tmp_path, state="failed")
    (run / "recipe.toml").write_text(load_recipe("tiny").to_toml())
    make_checkpoint(run, 4)
    settings = ("--set", "optimizer.lr=0.5", "--set", "lora.rank=3", "--set", "save_every=7")
    said = refused(fab(tmp_path, "train", "--resume", "--here", "--steps", "999", *settings))
    for part in ("optimizer.lr 0.5 instead of ", "lora.rank 3 instead of ", "steps 999 instead of ", "cannot change"):
        assert part in said
    assert "save_every" not in said and "--force" not in said
    assert "--force" in refused(fab(tmp_path, "train", "--resume", "--here", "--set", "optimizer.lr=0.5"))
    assert not (run / "recipe.before-4.toml").exists()


def test_what_a_resume_would_change_is_said_as_it_is_typed(tmp_path: Path):
    run = make_run(tmp_path, state="failed")
    (run / "recipe.toml").write_text(with_changes(load_recipe("tiny"), steps=None, epochs=20.0).to_toml())
    make_checkpoint(run, 4)
    said = refused(fab(tmp_path, "train", "--resume", "--here", "--steps", "200", "--set", "lora.dora=true"))
    for part in ("no epochs instead of 20, ", "steps 200 instead of none", "lora.dora true instead of false"):
        assert part in said


def test_lines_are_printed_for_a_run_that_is_neither_resumed_nor_followed(tmp_path: Path):
    assert "--detach" in refused(fab(tmp_path, "train", "--model", "tiny", "--print", "torchrun", "--detach"))


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_steps_that_are_none_are_refused(tmp_path: Path, steps: str):
    said = refused(fab(tmp_path, "train", "--model", "tiny", f"--steps={steps}", "--here"))
    assert "steps: " in said
    assert not (tmp_path / "runs").exists()


RUN = "tiny-20260131-154500"


def make_run(folder: Path, **status: object) -> Path:
    """A run of this machine that is over."""
    run = folder / "runs" / RUN
    (run / "logs").mkdir(parents=True)
    launch = Launch(RUN, str(run), (Host("localhost", "", 1),), "training.node.finetune", (), "python", {}, here=True)
    (run / "launch.json").write_text(launch_text(launch))
    (run / "status.json").write_text(json.dumps({"run_id": RUN, "reason": "rank 0 said so", **status}))
    return run


def make_checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step}"
    (folder / "adapter").mkdir(parents=True)
    for name in PARTS:
        (folder / name).write_text(name)
    (folder / "SHA256SUMS").write_text(sums_text(sums_of(folder)))


@pytest.mark.parametrize(("cause", "code"), [("unusable", 2), ("wrong_checkpoint", 2), ("ended", 1)])
def test_what_cannot_be_used_ends_with_code_2_and_what_broke_with_1(tmp_path: Path, cause: str, code: int):
    make_run(tmp_path, state="failed", cause={"kind": cause})
    done = fab(tmp_path, "logs", "--follow", "--here")
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.strip().endswith("rank 0 said so") and len(done.stderr.strip().splitlines()) == 1


def test_a_run_with_damaged_checkpoints_only_is_not_resumed(tmp_path: Path):
    run = make_run(tmp_path, state="failed")
    for step in (2, 4):
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert "only damaged checkpoints (step-4, step-2)" in refused(fab(tmp_path, "train", "--resume", "--here"))


@pytest.mark.parametrize(
    "words", [("stop",), ("train", "--resume"), ("logs", "--rank", "0")], ids=["stop", "resume", "rank log"]
)
@pytest.mark.parametrize("pretends", [True, False], ids=["to be of here", "to be of a head"])
def test_nothing_of_a_fetched_run_is_executed_here(tmp_path: Path, words: tuple[str, ...], pretends: bool):
    run = make_run(tmp_path, state="failed")
    make_checkpoint(run, 4)
    (run / "logs" / "rank-0.log").write_text("its own log")
    planted, secret = tmp_path / "elsewhere", tmp_path / "elsewhere" / "logs" / "rank-0.log"
    (planted / "logs").mkdir(parents=True)
    secret.write_text("a secret of this machine")
    (planted / "training").mkdir()
    program = run / "logs" / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    program.chmod(0o755)
    launch = Launch(RUN, str(run if pretends else planted), (Host("localhost", "", 1),), "training.node.finetune", (),
                    str(program), {"PATH": str(run / "logs"), "LD_PRELOAD": str(program)}, here=True)  # fmt: skip
    (run / "launch.json").write_text(launch_text(launch))
    (run / "training").mkdir()  # a copy by hand brings the code too
    (run / "training" / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    done = fab(tmp_path, words[0], *words[1:], "--here", *(["--detach"] if words[0] == "train" else []))
    assert not (tmp_path / "executed").exists(), done.stdout + done.stderr
    assert not list(planted.glob("hostfile")) and "secret" not in done.stdout
    if not pretends:
        assert "that was fetched is no run of this machine: leave --here out" in refused(done)
    elif words[0] != "train":
        assert done.returncode == 0, done.stderr


def test_the_log_of_a_run_that_no_rank_began_is_how_it_ended(tmp_path: Path):
    make_run(tmp_path, state="failed")
    done = fab(tmp_path, "logs", "--here")
    assert done.returncode == 0 and "rank 0 said so" in done.stdout and "cannot open" not in done.stdout + done.stderr


def test_the_newest_run_here_is_one_that_was_made_here(tmp_path: Path):
    make_run(tmp_path, state="finished")
    fetched = tmp_path / "runs" / "tiny-20260131-160000"
    fetched.mkdir()
    launch = Launch(
        fetched.name, f"/data/runs/{fetched.name}", (Host("te1", "", 1),), "training.node.finetune", (), "python", {}
    )
    (fetched / "launch.json").write_text(launch_text(launch))
    (fetched / "status.json").write_text(json.dumps({"run_id": fetched.name, "state": "finished"}))
    done = fab(tmp_path, "train", "--resume", "--here")
    assert f"{RUN} is finished" in refused(done)
    for words in (["--force", "--steps", "9"], []):
        said = refused(fab(tmp_path, "train", "--resume", fetched.name, "--here", *words))
        assert f"was made at '/data/runs/{fetched.name}'" in said and "leave --here out" in said
    assert "README.md" not in said, "no adapter was fetched"
    (fetched / "adapter").mkdir()
    (fetched / "adapter" / "README.md").write_text("# loaded so")
    said = refused(fab(tmp_path, "train", "--resume", fetched.name, "--here"))
    assert f"load what it learned as {fetched}/adapter/README.md says" in said


def test_one_cut_status_does_not_hide_the_other_runs(tmp_path: Path):
    run = make_run(tmp_path, state="finished")
    (run / "launch.json").write_text("{}")
    (run / "status.json").write_text('{"run_id": "tiny-2026')
    other = tmp_path / "runs" / "tiny-20260131-160000"
    other.mkdir()
    (other / "launch.json").write_text("{}")
    (other / "status.json").write_text(json.dumps({"run_id": other.name, "state": "finished"}))
    (other / "metrics.jsonl").write_text('{"step": 1, "lo{"step": 2}\n')
    values = json.loads(fab(tmp_path, "status", "--here", "--json").stdout)
    assert {each["run"]: each["state"] for each in values["runs"]} == {other.name: "finished", RUN: "lost"}
    shown = fab(tmp_path, "status", "--here")
    assert shown.returncode == 0, shown.stderr
    assert all(part in shown.stdout for part in (RUN, "lost", "status.j", other.name, "finished")), shown.stdout
    logs = fab(tmp_path, "logs", "--follow", "--here", "--run", RUN)
    assert logs.returncode == 1 and "its status.json cannot be read" in logs.stderr and "Traceback" not in logs.stderr
    assert "its launch.json cannot be read" in refused(fab(tmp_path, "stop", "--here"))


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("stopped", 3)])
def test_who_follows_a_run_learns_from_the_exit_code_whether_it_is_done(tmp_path: Path, state: str, code: int):
    make_run(tmp_path, state=state)
    done = fab(tmp_path, "logs", "--follow", "--here")
    assert done.returncode == code, done.stdout + done.stderr
    assert RUN in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_run_of_this_machine_that_was_only_followed_says_where_what_it_learned_is(tmp_path: Path):
    run = make_run(tmp_path, state="finished")
    with_checkpoint(run, 4)
    done = fab(tmp_path, "logs", "--follow", "--here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"it is in runs/{RUN}/adapter, verified" in done.stdout.replace(f"{tmp_path}/", "")
    assert f"next: fab generate --run {RUN} --here" in done.stdout
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_a_run_of_nodes_that_was_only_followed_names_the_command_that_brings_it_home(tmp_path: Path, capsys):
    head = HereHead(tmp_path / "runs")
    head.here = False  # a folder that is not home
    run = make_run(tmp_path, state="finished")
    fetch.print_results_place(head, RUN)
    assert capsys.readouterr().out == ""
    with_checkpoint(run, 4)
    fetch.print_results_place(head, RUN)
    assert capsys.readouterr().out == f"next: fab fetch --run {RUN} brings home what it learned\n"
    fetch.print_results_place(head, "check-20260131-154500")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("state", "step"), [("stopped", 4), ("lost", 4), ("stopped", None), ("finished", 4)])
def test_a_stop_says_how_a_run_goes_on_that_did_not_finish(tmp_path: Path, state: str, step: int | None):
    run = make_run(tmp_path, state="running" if state == "lost" else state)
    here = (Host("localhost", "127.0.0.1", 1),)
    launch = Launch(RUN, str(run), here, "training.node.finetune", (), sys.executable, {}, here=True)
    (run / "launch.json").write_text(launch_text(launch))
    if step:
        make_checkpoint(run, step)
    done = fab(tmp_path, "stop", "--here")
    assert done.returncode == 0, done.stderr
    ended, *way = done.stdout.splitlines()
    assert ended == f"{RUN} {state}; no process of it is left on any node"
    saved = f"saved at step 4; go on: fab train --resume {RUN} --here"
    unsaved = "it ended before its first checkpoint: start anew with fab train"
    assert way == ([] if state == "finished" else [saved if step else unsaved])


def test_a_stop_ends_what_is_going_on_though_a_newer_run_is_there(tmp_path: Path):
    make_run(tmp_path, state="finished")
    with going_on(tmp_path / "runs", "prove-20250101-000000") as supervisor:
        done = fab(tmp_path, "stop", "--here")
        assert supervisor.wait(60) == -signal.SIGTERM
    assert "prove-20250101-000000" in done.stdout


def test_watching_a_run_that_is_over_fetches_once_more_and_ends(tmp_path: Path):
    make_run(tmp_path, state="finished")
    done = fab(tmp_path, "fetch", "--watch", "--here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("there is no checkpoint") == 2


@pytest.mark.parametrize("task", ["logs", "stop", "fetch"])
def test_an_unknown_run_is_refused(tmp_path: Path, task: str):
    said = refused(fab(tmp_path, task, "--here", "--run", "tiny-20260101-000000"))
    assert said.startswith("no run 'tiny-20260101-000000'")


def test_a_missing_cluster_file_is_one_sentence(tmp_path: Path):
    assert "there is no such file" in refused(fab(tmp_path, "status"))


def test_h_does_not_start_a_training(tmp_path: Path):
    done = fab(tmp_path, "train", "-h")
    assert not (tmp_path / "runs").exists()
    assert "preparing" not in done.stdout


def test_listing_the_tasks_imports_nothing_heavy(tmp_path: Path):
    code = (
        "import sys; import training.laptop.tasks; "
        "heavy = {'torch', 'pyinfra', 'pydantic', 'rich', 'paramiko'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cluster(monkeypatch, node: Node, line_rate_gbps: float = 0) -> None:
    """Two nodes, both of them the one that a server plays."""
    nodes = tuple(replace(node, rank=rank, name=f"te{rank + 1}", price_h=1.5, currency="CNY") for rank in range(2))
    settings = Settings(name="mine", network=Network(line_rate_gbps=line_rate_gbps))
    monkeypatch.setattr(open_cluster, "load_cluster", lambda: Cluster(settings, nodes))


def test_every_connection_is_closed_in_the_end_also_after_a_failure(node, server, tmp_path: Path, monkeypatch):
    cluster(monkeypatch, node)
    with open_cluster.open_cluster(here=False) as opened:
        answers = opened.ask_all(f"mkdir {tmp_path}/once && echo made")
        assert opened.head.shell("echo from te1") == "from te1\n"
        assert server.open_connections
    failed = [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert sorted(answers) == ["te1", "te2"]
    assert any("File exists" in str(error) for error in failed)
    until(lambda: server.open_connections == 0, "no connection is open", 5)
    assert len(server.transports) == 3


@pytest.mark.parametrize(("said", "rate"), [(0.0, None), (25.0, 25.0)], ids=["unknown", "25 Gbit/s"])
def test_the_line_rate_comes_from_the_settings_and_the_check_bears_the_clusters_name(node, monkeypatch, said, rate):
    cluster(monkeypatch, node, said)
    with open_cluster.open_cluster(here=False) as opened:
        assert (opened.line_rate_gbps, opened.name) == (rate, "mine")
        launch = opened.launch_of("tiny-20260101-000000", "training.node.finetune")
        assert (launch.price_h, launch.currency) == (3.0, "CNY"), "of both machines together"
        assert launch.run_dir == "/data/runs/tiny-20260101-000000"
        assert opened.launch_of("check-20260101-000000", "").data_disk == "/data"
