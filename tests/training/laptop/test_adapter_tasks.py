"""After training, as a user types it: on this machine, with a run that has a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import programs, tiny_adapter
from tests.support.run_folders import supervisor_of
from training.laptop import base_model
from training.laptop.adapter.tuned_model import Room, chosen_step, use_of_merged
from training.laptop.base_model import refuse_gone
from training.laptop.head_node import HereHead
from training.recipe.base import TINY, Base
from training.run.evaluations import read_evaluations
from training.run.launch import LaunchError
from training.text.problems import AdapterError

ROOT = Path(__file__).parents[3]
FABFILE = "from training.laptop.adapter.tasks import namespace\n"
RUN, WHOLE = "tiny-20260131-154500", "tiny-20260130-154500"
QUESTION = "What does shutil.rmtree do?"


def environment(home: Path) -> dict[str, str]:
    """This one's, with a home of its own: models of this machine lie below it."""
    return {**os.environ, "HOME": str(home), "PYTHONPATH": programs.PATH, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def fab(folder: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run fab with these tasks alone, in a folder of its own."""
    (folder / "fabfile.py").write_text(FABFILE)
    env = environment(folder)
    return subprocess.run(
        [sys.executable, "-m", "fabric", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        input=stdin,
        timeout=180,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_newest_the_best_or_a_numbered_checkpoint_is_chosen():
    names = ["best", "step-2", "step-10", ".tmp-step-12"]
    for asked, step in (("", 2), ("newest", 10), ("best", 2), ("2", 2), ("step-10", 10)):
        assert chosen_step(names, "step-2\n", asked, RUN) == step
    assert chosen_step(["step-2", "step-10"], "", "", RUN) == 10
    with pytest.raises(AdapterError, match="no checkpoint 7; there are 2, 10, best and newest"):
        chosen_step(names, "step-2\n", "7", RUN)
    with pytest.raises(AdapterError, match="without validation"):
        chosen_step(["step-2"], "", "best", RUN)
    with pytest.raises(AdapterError, match="no checkpoint yet"):
        chosen_step([], "", "", RUN)


def test_a_model_is_spread_where_its_weights_and_what_they_need_exceed_the_card():
    assert not Room(5 << 40, None).too_big
    assert [Room(gib << 30, 22 << 30).too_big for gib in (15, 30)] == [False, True]


@pytest.mark.parametrize("task", ["generate", "evaluate", "merge"])
def test_an_unknown_run_is_refused(tmp_path: Path, task: str):
    said = refused(fab(tmp_path, task, "--here", "--run", "tiny-20260101-000000"))
    assert said.startswith("no run 'tiny-20260101-000000'")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--prompt", " "], "prompt 1 is empty"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--prompt", "x", "--out", "nowhere/a.jsonl"], "there is no folder nowhere"),
        (["--prompt", "x", "--out", "."], "--out .: it is a folder; name a file"),
        (["--out", "a.jsonl"], "a chat is not written down; say --prompt or --prompts"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_place_is_looked_for(tmp_path: Path, words, sentence: str):
    assert sentence in refused(fab(tmp_path, "generate", *words))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished run of this machine with a checkpoint; its base model among the models."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    from training.laptop.open_cluster import launch_here
    from training.node.checkpoint import base_model_hash
    from training.run.launch import launch_text

    home = tmp_path_factory.mktemp("home")
    folder = home / "runs" / RUN
    base = tiny_adapter.write_base(home / ".cache" / "spotune" / "models" / "base")
    tiny_adapter.write_adapter(base, folder / "checkpoints" / "step-2" / "adapter")
    state = {"base_model": base_model_hash(base), "step": 2}
    (folder / "checkpoints" / "step-2" / "trainer_state.json").write_text(json.dumps(state))
    (folder / "logs").mkdir()
    launch = launch_here(folder, "training.node.finetune", os.environ["PATH"], home)
    (folder / "launch.json").write_text(launch_text(launch))
    (folder / "plan.json").write_text(json.dumps({"model_dir": "base"}))
    (folder / "recipe.toml").write_text("max_length = 128\n")
    (folder / "status.json").write_text(json.dumps({"run_id": RUN, "state": "finished"}))
    add_whole(home, folder, base)
    return SimpleNamespace(home=home, folder=folder, base=base)


def add_whole(home: Path, folder: Path, base: Path) -> None:
    """An earlier run of the same base that trained every weight."""
    from training.node.adapter.merge import merge

    other = home / "runs" / WHOLE
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("adapter"))
    merge(base, folder / "checkpoints" / "step-2" / "adapter", other / "checkpoints" / "step-2" / "model")
    for name in ("launch.json", "status.json"):
        (other / name).write_text((other / name).read_text().replace(RUN, WHOLE))


def left_behind(home: Path) -> list[str]:
    """Processes whose command line or folder is below `home`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(home) in words or str((process / "cwd").readlink()).startswith(str(home)):
                found.append(words)
        except OSError:
            continue
    return found


@pytest.mark.torch
def test_a_prompt_file_is_answered_on_one_process_and_over_two_ranks_alike(run):
    (run.home / "q.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    words = ["generate", "--here", "--prompts", "q.jsonl", "--max-new-tokens", "12"]
    alone = fab(run.home, *words)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    across = fab(run.home, *words, "--across", "--out", "across.jsonl")
    assert across.returncode == 0, across.stdout + across.stderr
    assert "each rank held its share" in across.stdout
    found = json.loads((run.home / "q.answers.jsonl").read_text())
    assert found == json.loads((run.home / "across.jsonl").read_text())
    assert found["base"] != found["tuned"]
    assert left_behind(run.home) == []
    # the run of the answers is no training: a later command without --run means the training
    shown = fab(run.home, "generate", "--here", "--prompt", QUESTION, "--max-new-tokens", "12")
    assert found["tuned"].split()[0] in shown.stdout and "base" in shown.stdout and "tuned" in shown.stdout


@pytest.mark.torch
def test_a_chat_goes_on_remembers_begins_anew_and_leaves_nothing(run):
    lines = f"{QUESTION}\n\nAnd os.walk?\n/reset\n{QUESTION}\n/exit\nnever asked\n"
    done = fab(run.home, "generate", "--here", "--max-new-tokens", "8", stdin=lines)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base and tuned listen" in done.stdout and "forgotten" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows[0] == rows[-1] and len(rows) == 3
    assert left_behind(run.home) == []


SHOWS_LENGTHS = """
from training.laptop.adapter import ask
built = ask.side_by_side
ask.side_by_side = lambda texts: print("so far", *map(len, texts.values()), flush=True) or built(texts)
"""


@pytest.mark.torch
def test_ctrl_c_ends_a_chat_cleanly_and_its_program_too(run):
    import signal

    (run.home / "fabfile.py").write_text(FABFILE + SHOWS_LENGTHS)
    env = {**environment(run.home), "PYTHONUNBUFFERED": "1"}
    argv = [sys.executable, "-m", "fabric", "generate", "--here", "--max-new-tokens", "900"]
    chat = subprocess.Popen(
        argv, cwd=run.home, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "listen" not in (said := chat.stdout.readline()):
        assert said, chat.stderr.read()
    chat.stdin.write(f"{QUESTION}\n")
    chat.stdin.flush()
    while not re.match("so far .*[1-9]", line := chat.stdout.readline()):
        assert line, chat.stderr.read()
    chat.send_signal(signal.SIGINT)  # in the middle of an answer
    _, errors = chat.communicate(timeout=120)
    assert (chat.returncode, errors) == (0, "")
    assert left_behind(run.home) == []


@pytest.mark.torch
def test_an_evaluation_is_a_table_and_stays_with_the_run(run):
    records = [{"prompt": f"{n}?", "completion": f"第{n}个答案"} for n in range(3)]
    (run.home / "held.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = fab(run.home, "evaluate", "--here", "--data", "held.jsonl", "--answers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held.jsonl: 3 samples" in done.stdout and "loss on held.jsonl" in done.stdout and "ROUGE-L" in done.stdout
    assert "held-out loss" not in done.stdout
    (run.home / "several").mkdir()
    for n, record in enumerate(records[:2]):
        (run.home / "several" / f"{n}.jsonl").write_text(json.dumps(record) + "\n")
    done = fab(run.home, "evaluate", "--here", "--data", "several", "--answers", "0")
    assert done.returncode == 0 and "2 samples" in done.stdout, done.stdout + done.stderr
    found = {each["of"]: each for each in read_evaluations(run.folder)}
    assert set(found) == {"held.jsonl", "several"}, "none takes the place of another, or of the split's"
    assert not (run.folder / "evaluation.json").exists()
    assert found["several"]["base"]["loss"] != found["several"]["tuned"]["loss"]
    (run.home / "repairs.jsonl").write_text('{"prompt": "only"}\n' + json.dumps(records[2]) + "\n")
    done = fab(run.home, "evaluate", "--here", "--data", "repairs.jsonl", "--data", "several", "--answers", "0")
    assert done.returncode == 2 and "1 bad record: fix them, or skip them with --skip-bad" in done.stderr
    both = ("--data", "repairs.jsonl", "--data", "several", "--skip-bad")
    done = fab(run.home, "evaluate", "--here", *both, "--answers", "0")
    assert done.returncode == 0 and "1 bad record left out" in done.stdout, done.stdout + done.stderr
    assert "repairs.jsonl, several: 3 samples" in done.stdout
    assert "--skip-bad is for --data" in refused(fab(run.home, "evaluate", "--here", "--skip-bad"))
    assert "give records it has not learned from: --data" in refused(fab(run.home, "evaluate", "--here"))


@pytest.mark.torch
def test_a_run_that_trained_every_weight_is_asked_and_measured_beside_its_base(run):
    asked = ["generate", "--here", "--run", WHOLE]
    (run.home / "w.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    done = fab(run.home, *asked, "--prompts", "w.jsonl", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((run.home / "w.answers.jsonl").read_text())
    assert found["base"] != found["tuned"]
    (run.home / "held.jsonl").write_text(json.dumps({"prompt": "1?", "completion": "第1个答案"}) + "\n")
    done = fab(run.home, "evaluate", "--here", "--run", WHOLE, "--data", "held.jsonl", "--answers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = (run.home / "runs" / WHOLE).glob("evaluation-of-*.json")
    losses = json.loads(measured.read_text())
    assert losses["base"]["loss"] != losses["tuned"]["loss"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["merge"], "there is no adapter to merge; "),
        (["generate", "--prompt", QUESTION, "--across"], "never over all ranks; "),
    ],
)
def test_what_a_whole_model_needs_no_adapter_for_is_refused_with_its_folder_and_what_loads_it(run, words, why):
    said = refused(fab(run.home, *words, "--here", "--run", WHOLE))
    folder = run.home / "runs" / WHOLE / "checkpoints" / "step-2" / "model"
    assert said.startswith(f"{WHOLE} trained the whole model: ") and f"{why}{folder} is a plain model folder" in said
    assert said.endswith(f"fab train --model {folder} --data FILE --here trains from it")


@pytest.mark.torch
def test_nothing_is_asked_of_a_model_while_a_run_needs_the_machine(run):
    going_on = run.home / "runs" / "tiny-20260201-000000"
    shutil.copytree(run.folder, going_on)
    launch = (run.folder / "launch.json").read_text().replace(RUN, going_on.name)
    (going_on / "launch.json").write_text(launch)
    with supervisor_of(going_on) as supervisor:
        status = {"run_id": going_on.name, "state": "running", "supervisor_pid": supervisor.pid}
        (going_on / "status.json").write_text(json.dumps(status))
        for words in (["generate", "--prompt", QUESTION], ["evaluate"]):
            said = refused(fab(run.home, *words, "--here", "--run", RUN))
            assert said.startswith(f"{going_on.name} is running on this machine; wait for it, or end it with")
        said = refused(fab(run.home, "merge", "--here"))
        assert said.startswith(f"{going_on.name} is running on this machine; wait for it, or end it with")
        assert said.endswith("; --checkpoint 2 merges what it has learned by now")
        done = fab(run.home, "merge", "--here", "--checkpoint", "2")
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(going_on)


@pytest.mark.torch
def test_a_merge_lands_in_the_runs_folder_and_not_twice(run):
    done = fab(run.home, "merge", "--here", "--checkpoint", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sealed by SHA256SUMS" in done.stdout
    folder = run.folder / "merged"
    assert done.stdout.startswith(f"merging step 2 of {RUN} into {folder}: ")
    assert done.stdout.splitlines()[-1] == (
        f"next: fab train --model {folder} --data FILE --here trains from it; "
        f"fab publish --repo OWNER/NAME --run {RUN} --merged puts it on the hub; transformers and vLLM load the folder"
    )
    assert {"config.json", "model.safetensors", "SHA256SUMS"} <= {p.name for p in (run.folder / "merged").iterdir()}
    again = fab(run.home, "merge", "--here")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"already merged, step 2: {folder} on this machine" in again.stdout
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    (folder / "config.json").write_text("{}")
    done = fab(run.home, "merge", "--here")
    said = refused(done)
    assert done.stdout == ""
    assert said.startswith(
        f"{folder} is not empty: step-2, damaged, lies there, not step-2 whole; rm -r {folder} removes it"
    )
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert "something else lies there, not step-2" in refused(fab(run.home, "merge", "--here"))


@pytest.fixture
def moved_base(run):
    """The base is a folder of the user's, linked to among the models, and no longer there."""
    mine, recipe = run.home / "my models" / "my-model", run.folder / "recipe.toml"
    text = recipe.read_text()
    shutil.copytree(run.base, mine)
    kept = run.base.rename(run.base.with_name("kept"))
    run.base.mkdir()
    for path in mine.iterdir():
        (run.base / path.name).symlink_to(path)
    recipe.write_text(text + f"base_model = {json.dumps(f'folder:{mine}')}\n")
    shutil.rmtree(mine)
    yield mine
    recipe.write_text(text)
    shutil.rmtree(run.base, ignore_errors=True)
    kept.rename(run.base)


@pytest.mark.torch
@pytest.mark.parametrize("words", [["generate", "--prompt", QUESTION], ["evaluate"], ["merge"]], ids=lambda w: w[0])
def test_a_base_model_that_is_gone_is_one_sentence_with_the_users_own_folder(run, moved_base, words):
    said = refused(fab(run.home, *words, "--here", "--run", RUN))
    assert said == f"the base model of {RUN} is gone: there is no {moved_base} any more; put it back there"
    shutil.rmtree(run.base)
    said = refused(fab(run.home, *words, "--here", "--run", RUN))
    assert said == (
        f"the base model of {RUN} is gone: this machine has it no more at {run.base}; "
        f"fab train --model '{moved_base}' --data FILE --here --dry puts it back"
    )


def test_a_base_that_was_merged_in_a_run_deleted_since_is_not_said_to_be_put_back_by_a_train(tmp_path):
    launch = SimpleNamespace(run_id=RUN, models=str(tmp_path / "models"))
    merged = tmp_path / "runs" / WHOLE / "merged"
    with pytest.raises(LaunchError) as refused:
        refuse_gone(HereHead(tmp_path / "runs"), launch, "merged-1", Base.parse(f"folder:{merged}"))
    assert f"it was merged from {WHOLE}, which is no longer on this machine" in str(refused.value)
    assert "put it back" not in str(refused.value) and "puts it back" not in str(refused.value)


def test_other_weights_in_a_bases_folder_are_refused_and_other_words_beside_them_are_not(tmp_path):
    own, head = tmp_path / "own", HereHead(tmp_path / "runs")
    own.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (own / name).write_text("as it was")
    recipe = SimpleNamespace(base_model=Base.parse(f"folder:{own}"), model_dir="own-1")
    base_model.link_model(recipe, tmp_path / "models")
    launch = SimpleNamespace(run_id=RUN, models=str(tmp_path / "models"))
    (own / "README.md").write_text("more words")
    refuse_gone(head, launch, "own-1", recipe.base_model)
    (own / "model.safetensors").write_text("as it is")
    with pytest.raises(LaunchError, match=rf"{own}/model.safetensors was changed since {RUN} was trained from it"):
        refuse_gone(head, launch, "own-1", recipe.base_model)


def test_weights_that_are_gone_from_the_heads_disk_are_put_back_by_the_base_deploy(tmp_path):
    head = HereHead(tmp_path / "runs")
    head.here = False
    launch = SimpleNamespace(run_id=RUN, models=str(tmp_path / "models"), deploy="pyinfra deploy/base.py")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    with pytest.raises(LaunchError) as gone:
        refuse_gone(head, launch, "tiny", TINY, ("tiny",))
    assert str(gone.value).endswith("/models/tiny; to put it back, run the base deploy: pyinfra deploy/base.py")
    with pytest.raises(LaunchError, match=r"name tiny in \[models\] names of cluster.toml, then run the base deploy"):
        refuse_gone(head, launch, "tiny", TINY)
    (tmp_path / "models" / "tiny" / "model.safetensors").touch()
    refuse_gone(head, launch, "tiny", TINY)


def test_a_merged_model_that_came_home_is_deployed_before_the_nodes_train_from_it():
    about = SimpleNamespace(run_id=RUN, launch=SimpleNamespace(deploy="pyinfra inventory/static.py deploy/base.py"))
    folder = f"./runs/{RUN}/merged"
    assert use_of_merged(about, folder, SimpleNamespace(here=False)).startswith(
        f'next: add "{folder}" to [models] names in cluster.toml; pyinfra inventory/static.py deploy/base.py; '
        f"then fab train --model {folder} --data FILE trains from it; fab publish"
    )
