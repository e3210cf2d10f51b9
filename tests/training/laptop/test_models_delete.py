"""`fab models.delete`: a base model goes from all nodes, and not from under what uses it. And which node has which."""

import mmap
import subprocess
import sys
from dataclasses import replace

import pytest

from inventory.settings import Models, Settings
from tests.support.run_folders import supervisor_of
from training.laptop import models_on_nodes
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.run.folder import LAUNCH, STATUS, Status, status_text
from training.run.launch import LaunchError
from training.text.files import ORIGIN

RUN = "tiny-20260131-154500"


class Nodes(Session):
    """Three nodes whose disks are folders of this machine; te3 does not answer."""

    def launch_of(self, run_id, module, arguments=()):
        return replace(super().launch_of(run_id, module), models=str(self.head.runs.parent / "models"))

    def ask_all(self, command):
        models = str(self.head.runs.parent / "models")[1:]  # as it stands in a pattern too
        told = {name: self.head.shell(command.replace(models, f"{models}{more}")) for name, more in NODES}
        return {**told, "te3": OSError("timed out")}


NODES = (("te1", ""), ("te2", "-of-te2"))


@pytest.fixture
def disk(tmp_path):
    for _, more in NODES:
        for name in ("tiny", "qwen3-8b", "tiny-not"):
            folder = tmp_path / f"models{more}" / name
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"w" * (2 << 20))
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.fixture
def cluster(disk):
    return Nodes(
        HereHead(disk / "runs"), settings=Settings(provider="static", models=Models(names=("./not-there", "tiny")))
    )


def folders(disk, more=""):
    return sorted(path.name for path in (disk / f"models{more}").iterdir())


def test_what_lies_whole_on_a_node_is_asked_of_every_node(cluster, disk):
    for place in ("models/tiny", "models/qwen3-8b", "models-of-te2/tiny"):
        (disk / place / ORIGIN).write_text("{}")
    assert models_on_nodes.lying(cluster) == ({"te1": {"tiny", "qwen3-8b"}, "te2": {"tiny"}}, {"te3": "timed out"})


def test_a_model_goes_from_every_node_and_what_that_frees_is_said_before(cluster, disk):
    going = models_on_nodes.plan_deletion(cluster, "qwen3-8b")
    said = list(going.lines)
    assert said[0] == f"delete  {disk}/models/qwen3-8b  on te1, te2: frees 4.0 MiB in all"
    assert said[1:] == ["stays   on te3, which could not be asked: timed out"]
    assert folders(disk) == ["qwen3-8b", "tiny", "tiny-not"]
    assert models_on_nodes.delete(cluster, going) == {}
    assert folders(disk) == folders(disk, "-of-te2") == ["tiny", "tiny-not"]


@pytest.mark.parametrize("name", ["qwen3:8b", "Qwen/Qwen3-8B", "acme/Tiny-Not", "tiny-not"])
def test_a_model_is_called_as_everywhere_or_by_its_folder(cluster, name):
    assert models_on_nodes.plan_deletion(cluster, name).folder in ("qwen3-8b", "tiny-not")


def test_one_that_cluster_toml_names_comes_back_and_that_is_said(cluster):
    assert any(
        '"tiny" stands in [models] names' in line for line in models_on_nodes.plan_deletion(cluster, "tiny").lines
    )


def test_a_model_that_is_nowhere_lists_those_there_are(cluster):
    with pytest.raises(LaunchError, match=r"no node has qwen3-14b at .*; there are: qwen3-8b, tiny, tiny-not"):
        models_on_nodes.plan_deletion(cluster, "qwen3-14b")
    with pytest.raises(LaunchError, match="no node has other"):
        models_on_nodes.plan_deletion(cluster, "other")


def test_of_this_machine_no_nodes_are_told_and_a_folder_of_the_users_stays(cluster, disk):
    here = replace(cluster, settings=None)
    with pytest.raises(LaunchError, match=r"^this machine does not have other at .*; there are: .*tiny-not$"):
        models_on_nodes.plan_deletion(here, "other")
    (own := disk / "own").mkdir()
    for there, who, folder in ((here, "this machine does not have", str(own)), (cluster, "no node has", "~/gone/own")):
        with pytest.raises(LaunchError, match=rf"^{who} .*/own at .*; a folder of your own is never deleted$"):
            models_on_nodes.plan_deletion(there, folder)


@pytest.mark.parametrize("how", ["--model {}", "--model={}", "{}/model.safetensors"])
def test_a_program_that_is_given_the_model_keeps_it_on_every_node(cluster, disk, how):
    words = how.format(disk / "models-of-te2" / "tiny").split()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=subprocess.PIPE
    ) as program:
        with pytest.raises(LaunchError, match=rf"tiny is in use on te2 by {program.pid} "):
            models_on_nodes.plan_deletion(cluster, "tiny")
        assert models_on_nodes.plan_deletion(cluster, "tiny-not")
        program.stdin.close()
    program.wait()
    assert models_on_nodes.plan_deletion(cluster, "tiny")


def test_a_program_that_has_its_weights_in_memory_keeps_it_too(cluster, disk):
    with (disk / "models" / "tiny" / "model.safetensors").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            with pytest.raises(LaunchError, match="tiny is in use on te1 by "):
                models_on_nodes.plan_deletion(cluster, "tiny")
    assert models_on_nodes.plan_deletion(cluster, "tiny")


def test_a_run_that_is_going_on_keeps_its_base_model_and_no_other(cluster, disk):
    run = disk / "runs" / RUN
    run.mkdir()
    (run / LAUNCH).write_text("{}")
    (run / "plan.json").write_text('{"model_dir": "tiny"}')
    with supervisor_of(run) as supervisor:
        (run / STATUS).write_text(status_text(Status(RUN, "running", supervisor_pid=supervisor.pid)))
        with pytest.raises(LaunchError, match=f"{RUN} trains tiny now.* fab stop --run {RUN}"):
            models_on_nodes.plan_deletion(cluster, "tiny")
        assert models_on_nodes.plan_deletion(cluster, "qwen3-8b")


def test_a_base_that_runs_with_a_checkpoint_were_trained_from_is_kept_unless_by_force(cluster, disk):
    for number in range(5):
        run = disk / "runs" / f"tiny-2026020{number + 1}-000000"
        (run / "checkpoints" / "step-4").mkdir(parents=True)
        (run / "plan.json").write_text('{"model_dir": "tiny"}')
    (disk / "runs" / RUN).mkdir()
    (disk / "runs" / RUN / "plan.json").write_text('{"model_dir": "tiny-not"}')
    with pytest.raises(LaunchError) as refused:
        models_on_nodes.plan_deletion(cluster, "tiny")
    newest = ", ".join(f"tiny-2026020{number}-000000" for number in (5, 4, 3))
    assert str(refused.value).startswith(f"tiny is the base model of {newest} and 2 more, which cannot be asked")
    assert models_on_nodes.plan_deletion(cluster, "tiny", force=True)
    assert models_on_nodes.plan_deletion(cluster, "tiny-not"), "a run without a checkpoint needs none"
