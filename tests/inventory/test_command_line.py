"""What a user mistypes ends in one sentence and an exit code."""

import ast
import errno
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from invoke import Exit, ParseError, Parser

import fabfile
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.command_line import ask, help_wanted, sentences, spelled_out
from inventory.errors import InventoryError
from inventory.localcloud.commands import LocalCloudError
from inventory.node_program import ProgramError, ProgramRefused
from inventory.settings import SettingsError
from inventory.shown import only_json_on_stdout, print_json
from inventory.ssh import HostKeyError, SshError
from inventory.state import state_folder
from snapshots.listing import SnapshotError
from training.cost.shape import PlanError
from training.data.sample import DataError
from training.laptop.download import FileGone
from training.laptop.fetch import FetchInterrupted
from training.laptop.follow import RunFailed
from training.laptop.head_node import HeadError
from training.recipe.recipe import RecipeError
from training.run.checkpoint_files import DamagedError, FetchError
from training.run.launch import LaunchError
from training.text.problems import AdapterError, TrainingError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("buffered", ["", "1"])
def test_it_ends_without_a_word_once_nobody_reads_what_it_prints(buffered):
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONUNBUFFERED": buffered, "PYTHONPATH": ""}  # a Python of its own
    done = subprocess.run(
        [Path(sys.executable).with_name("fab"), "--list"], cwd=ROOT, env=env, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert done.stderr == b""


def fab(*argv, cluster=os.devnull):
    return subprocess.run(
        [Path(sys.executable).with_name("fab"), *argv],
        cwd=ROOT,
        env={**os.environ, "SPOTUNE_CLUSTER": str(cluster)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_the_local_clouds_tasks_are_listed_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "local." not in fab("--list").stdout
    assert ".serve" in fab("--list=local").stdout
    (cloud := tmp_path / "spotune" / "localcloud" / "c1").mkdir(parents=True)
    (cloud / "api.json").write_text("{}")
    assert "local.serve" in fab("--list").stdout


def test_fab_alone_lists_the_commands():
    alone = fab()
    assert alone.returncode == 0 and alone.stdout.endswith(fab("--list").stdout)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["logs", "--rank=1.5"], "--rank needs a whole number, not '1.5'"),
        (["check", "--line-rate-gbps", "x"], "--line-rate-gbps needs a number, not 'x'"),
        (["logs", "--rank", "x"], "--rank needs a whole number, not 'x'"),
        (["up", "--nodes", "two"], "--nodes needs a whole number, not 'two'"),
    ],
)
def test_a_malformed_flag_is_one_sentence_and_code_2(argv, sentence):
    done = fab(*argv)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, sentence, "")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train", "--model", "tiny", ""], "fab train does not know ''; fab --help train"),
        (["upp"], "there is no fab upp; the nearest is up; fab --list shows all"),
        (["train", "--modle", "tiny"], "fab train has no --modle; the nearest is --model; fab --help train"),
        (["train", "--modle=tiny"], "fab train has no --modle; the nearest is --model; fab --help train"),
        (["train", "--dri"], "fab train has no --dri; the nearest is --dry; fab --help train"),
        (
            ["train", "--optimizer.lr", "1e-3"],
            "fab train has no --optimizer.lr; recipe keys are set with --set KEY=VALUE; fab --help train",
        ),
        (["prove", "--zzzz", "16"], "fab prove has no --zzzz; fab --help prove"),
        (["up", "-y"], "fab up has no -y; the nearest is --yes; fab --help up"),
        (["status", "te2"], "fab status does not know 'te2'; fab --help status"),
        (["train", "－－model", "tiny"], "fab train does not know '－－model'; fab --help train"),
        (["train", "--set", "lora.targets=[q_proj]", "v_proj"], "fab train does not know 'v_proj'; fab --help train"),
        (
            ["generate", "who are you?"],
            "no run is called 'who are you?'; to ask it: fab generate --prompt 'who are you?'",
        ),
        (["generate", "你是谁？"], "no run is called '你是谁？'; to ask it: fab generate --prompt '你是谁？'"),
        (["qqqqqq"], "there is no fab qqqqqq; fab --list shows all"),
        (["models.add"], "fab models.add needs MODEL; fab --help models.add"),
        (["up", "--nodes"], "fab up --nodes needs a value; fab --help up"),
        (["train", "--model", "tiny", "--data"], "fab train --data needs a value; fab --help train"),
        (["generate", "--top-p", "--here"], "Flag --top-p needed value and was not given one!; fab --help generate"),
    ],
)
def test_a_word_that_is_not_known_or_is_missing_is_one_sentence_and_code_2(argv, sentence):
    done = fab(*argv)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, sentence, "")


def parsed(words):
    """What invoke makes of a command line of one task, as fab hands it over: its flags' values, by their names."""
    spelled, _ = spelled_out(words, "", fabfile.bare_words, fabfile.namespace)
    contexts = Parser(contexts=fabfile.namespace.to_contexts()).parse_argv(spelled)
    assert [context.name for context in contexts] == [words[0]]
    return {argument.name: argument.value for argument in contexts[0].args.values()}


def typed(argument):
    """A flag as it is typed, and what it then has."""
    if not argument.takes_value:
        return [f"--{'no-' if argument.default else ''}{argument.names[0]}"], not argument.default
    said = {int: "7", float: "0.5"}.get(argument.kind, "word")
    return [f"--{argument.names[0]}", said], [said] if argument.kind is list else argument.kind(said)


@pytest.mark.parametrize("task", sorted(fabfile.namespace.task_names))
def test_the_flags_of_a_task_may_be_typed_in_any_order(task):
    arguments = fabfile.namespace[task].get_arguments()
    needed = [argument for argument in arguments if argument.positional]
    for one, other in itertools.permutations(arguments, 2):
        flags = [one, other, *(argument for argument in needed if argument not in (one, other))]
        found = parsed([task, *itertools.chain.from_iterable(typed(flag)[0] for flag in flags)])
        assert [found[flag.name] for flag in flags] == [typed(flag)[1] for flag in flags], (one, other)


@pytest.mark.parametrize("task", sorted(fabfile.bare_words))
def test_the_word_without_a_flag_may_stand_before_and_behind_any_other_flag(task):
    flag = fabfile.bare_words[task]
    for other in fabfile.namespace[task].get_arguments():
        if other.name == flag or other.optional:
            continue
        words, value = typed(other)
        for said in ([task, *words, "it"], [task, "it", *words]):
            found = parsed(said)
            assert found[flag] in ("it", ["it"]) and found[other.name] == value, said


def test_a_folder_may_be_called_like_the_command_that_looks_into_it():
    for words in (["data", "data"], ["data", "data", "--show", "0"], ["data", "--here", "data"]):
        assert parsed(words)["data"] == ["data"]
    assert parsed(["data", "data", "more"])["data"] == ["data", "more"]


def test_help_behind_a_flag_whose_value_may_go_unsaid_is_help():
    assert help_wanted(["train", "--resume", "--help"], fabfile.namespace) == "train"


def test_what_invoke_says_of_a_flag_names_it_as_it_is_typed():
    with pytest.raises(ParseError, match=r"^Flag --max-new-tokens needed value and was not given one!$"):
        Parser(contexts=fabfile.namespace.to_contexts()).parse_argv(["generate", "--max-new-tokens"])


def test_the_list_of_tasks_is_short_and_each_line_of_it_a_whole_sentence():
    tasks = fabfile.namespace
    assert sum("." not in name for name in tasks.task_names) <= 20
    shown = {name: tasks[name].__doc__.splitlines()[0] for name in tasks.task_names}
    assert [line for line in shown.values() if len(line) > 75 or not line.endswith(".")] == []


def test_no_hint_names_another_inventory_than_these_machines():
    """Base deploys are typed as `Settings.deploy_command` says: what else names one is a docstring."""
    paths = [
        path for folder in ("deploy", "inventory", "snapshots", "training") for path in (ROOT / folder).rglob("*.py")
    ]
    found = set()
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        told = {text for text in said - {ast.get_docstring(tree, clean=False)} if isinstance(text, str)}
        found |= {str(path.relative_to(ROOT)) for text in told if "deploy/base.py" in text}
    assert found == {"inventory/settings.py"}


def test_the_help_still_says_what_kind_of_value_a_flag_takes():
    assert "--rank=INT" in fab("--help", "logs").stdout


@pytest.mark.parametrize("task", ["publish", "down", "local.cut", "local.fault", "models.add", "runs.delete", "train"])
def test_help_may_stand_behind_the_name_of_any_task(task):
    asked, native = fab(task, "--help"), fab("--help", task)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, native.stdout, native.stderr)
    assert "Options:" in asked.stdout or "Docstring:" in asked.stdout


def test_help_that_is_the_value_of_a_flag_is_no_question():
    tasks = fabfile.namespace
    assert help_wanted(["generate", "--prompt", "--help"], tasks) == ""
    assert help_wanted(["publish", "--run", "a", "--help"], tasks) == "publish"
    assert help_wanted(["--help"], tasks) == ""


def test_a_publish_that_says_no_place_is_told_how_to_say_it():
    done = fab("publish", "--run", "tiny-20260131-154500")
    assert (done.returncode, done.stderr.startswith("where to? fab publish --repo OWNER/NAME says it")) == (2, True)


def with_json():
    named = {name: fabfile.namespace[name] for name in fabfile.namespace.task_names}
    return [name for name, task in named.items() if any("json" in each.names for each in task.get_arguments())]


@pytest.mark.parametrize("task", with_json())
def test_with_json_an_error_too_is_one_value_on_stdout(task, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("colour = 1")
    done = fab(task, "--json", cluster=file)
    value = json.loads(done.stdout)
    if done.returncode:
        assert value["error"]["exit_status"] == done.returncode and value["error"]["message"] in done.stderr
    else:  # a list needs no cluster
        assert isinstance(value, list)


@pytest.mark.parametrize("flag", [["--nodes=x"], ["--colour"], ["--take"], ["more"], ["--json=yes"]], ids=" ".join)
def test_with_json_a_command_line_that_is_not_understood_is_one_value_on_stdout_too(flag):
    done = fab("plan", "--model=tiny", "--json", *flag)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_status"]) == (2, 2) and error["message"] in done.stderr


def test_with_json_all_but_the_first_value_goes_to_stderr(capfd):
    with pytest.raises(Exit), only_json_on_stdout():
        print("talk")
        print_json({"loss": float("nan")})
        print_json({})
        raise Exit("wrong", code=1)
    out, err = capfd.readouterr()
    assert json.loads(out) == {"loss": None}
    assert err == "talk\n{}\n"


def test_unusable_settings_end_a_task_with_code_2(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("colour = 1")
    done = fab("local.status", cluster=file)
    assert (done.returncode, done.stderr) == (2, f"{file}: colour: unknown key\n")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *((mistake, 2) for mistake in (SettingsError, RentError, LocalCloudError)),
        *((mistake, 2) for mistake in (RecipeError, DataError, PlanError, LaunchError, AdapterError, ProgramRefused)),
        *((mistake, 2) for mistake in (FetchError, DamagedError, FileGone)),
        *((failure, 1) for failure in (SshError, HostKeyError, SnapshotError, HeadError, RunFailed, ProgramError)),
        (FetchInterrupted, 1),
    ],
)
def test_mistakes_are_code_2_and_failures_code_1(kind, code):
    with pytest.raises(Exit) as caught, sentences():
        raise kind("why")
    assert (caught.value.message, caught.value.code) == ("why", code)


def test_what_a_cloud_refuses_is_code_1():
    with pytest.raises(Exit) as caught, sentences():
        raise CloudError("why", Kind.INPUT)
    assert caught.value.code == 1


def test_every_error_of_the_control_sides_folders_says_its_exit_code():
    named = {
        "SettingsError",
        "CloudError",
        "RentError",
        "SshError",
        "LocalCloudError",
        "SnapshotError",
        "ProgramRefused",
    }
    assert named <= {kind.__name__ for kind in InventoryError.__subclasses__()}
    trained = {"RecipeError", "DataError", "PlanError", "LaunchError", "AdapterError", "FetchError"}
    assert trained <= {kind.__name__ for kind in TrainingError.__subclasses__()}


def test_an_error_nobody_expected_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), sentences():
        raise ZeroDivisionError


@pytest.mark.parametrize("name", ["HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"])
def test_seconds_that_the_hubs_client_cannot_be_imported_with_are_a_mistake_of_the_user(monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    with pytest.raises(Exit) as caught, sentences():
        runpy.run_module("huggingface_hub.constants")
    assert caught.value.code == 2 and name in caught.value.message
    monkeypatch.setenv(name, " 7 ")
    with pytest.raises(UnicodeError), sentences():
        runpy.run_module("huggingface_hub.constants")
        b"\xff".decode()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOLCK, "No locks available"),
        OSError(errno.ENOTSUP, "Operation not supported"),
        PermissionError(errno.EACCES, "Permission denied", str(state_folder() / "clusters")),
    ],
)
def test_a_state_folder_that_cannot_be_written_is_code_1(error):
    with pytest.raises(Exit) as caught, sentences():
        raise error
    assert caught.value.code == 1
    with pytest.raises(PermissionError), sentences():
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/other")


def test_ctrl_c_ends_a_task_with_a_sentence_and_code_130():
    with pytest.raises(Exit) as caught, sentences("interrupted; a disk is left"):
        raise KeyboardInterrupt
    assert (caught.value.message, caught.value.code) == ("interrupted; a disk is left", 130)


@pytest.mark.parametrize(("typed", "goes_on"), [("y", True), (" YES ", True), ("", False), ("no", False)])
def test_a_question_is_answered_at_a_terminal(monkeypatch, capfd, typed, goes_on):
    leader, follower = os.openpty()
    os.write(leader, f"{typed}\n".encode())
    with os.fdopen(follower) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        if goes_on:
            ask(False, "delete it?", "fab down --yes")
        else:
            with pytest.raises(Exit, match="nothing was done") as caught:
                ask(False, "delete it?", "fab down --yes")
            assert caught.value.code == 1
    os.close(leader)
    assert "delete it? [y/N]" in capfd.readouterr().out


def test_without_a_terminal_the_flag_that_says_yes_is_named(monkeypatch):
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        ask(True, "delete it?", "fab down --yes")
        with pytest.raises(
            Exit, match="delete it\\? There is no terminal to ask at; to say yes: fab down --yes"
        ) as caught:
            ask(False, "delete it?", "fab down --yes")
    assert caught.value.code == 2


@pytest.mark.parametrize("words", [["down", "--dry", "--yes"], ["--dry", "down", "--yes"], ["local.down", "--dry"]])
def test_a_dry_run_of_a_command_that_has_none_is_refused_and_does_nothing(words):
    done = fab(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("has no --dry; nothing was done")


@pytest.mark.parametrize(("pressed", "code"), [(EOFError, 1), (KeyboardInterrupt, 130)])
def test_neither_ctrl_d_nor_ctrl_c_at_a_question_is_a_yes(monkeypatch, pressed, code):
    def press(question):
        raise pressed

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", press)
    with pytest.raises(Exit, match="nothing was done") as caught:
        ask(False, "sure?", "fab up --yes")
    assert caught.value.code == code
