"""Programs that are forked from a server (tests/support/forks/) end as programs of their own do."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked_rank, programs
from tests.support.checkout import Checkout
from tests.support.forks.sitecustomize import ADDRESS, PROGRAMS
from tests.support.waiting import until

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 15)", -15), ("1 / 0", 1), ("raise KeyboardInterrupt", -2)],
)
def test_a_rank_ends_with_its_code_and_all_that_it_printed(tmp_path, end, code):
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys\nprint(*sys.argv[1:], os.environ['RANK'], flush=True)\n{end}\n")
    codes, outputs = forked_rank.finish(forked_rank.start(2, program, "a b"), 120)
    assert codes == [code, code]
    assert [output.splitlines()[0] for output in outputs] == ["a b 0", "a b 1"]


def test_a_program_whose_server_is_gone_did_not_end_well_and_is_not_run_again():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name := f"\0spotune-tests-{os.getpid()}-gone")
        server.listen()
        environment = os.environ | {ADDRESS: name[1:]}
        argv = [sys.executable, "-m", "training.node.outline", "--help"]
        program = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        asked, _ = server.accept()
        asked.recv(8)
        asked.close()
        assert (program.communicate(timeout=120)[0], program.returncode) == ("", os.EX_SOFTWARE)


def start(*words, folder=ROOT):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", *words], cwd=folder, text=True, **pipes)


def test_a_module_that_imports_torch_is_forked_and_ends_with_its_code():
    with start("training.node.outline") as program:
        _, error = program.communicate(timeout=120)
    assert program.returncode == 2 and error.startswith("usage: ")


@pytest.mark.parametrize(("peft", "there"), [(True, "peft torch"), (False, "peft torch training")])
def test_code_is_forked_from_what_has_ranks_imports_or_peft_alone(peft, there):
    code = "import sys; print(*sorted({'peft', 'torch', 'training'} & sys.modules.keys())); sys.exit(len(sys.argv))"
    done = subprocess.run(programs.forked(code, "a", "b", peft=peft), capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (3, there)


def test_fab_in_a_copy_of_the_checkout_runs_the_copys_modules(tmp_path):
    checkout = Checkout.at(tmp_path)
    tasks = tmp_path / "training" / "laptop" / "tasks.py"
    tasks.write_text(tasks.read_text() + "\nraise SystemExit('the copy')\n")
    assert checkout.fab("--list").stderr == "the copy\n"


def serving(folder):
    """A program that answers until its input ends, and the number of the one it stands for."""
    from tests.support.tiny_adapter import write_base

    words = ("--model", str(write_base(folder / "base")), "--serve")
    program = start("training.node.adapter.generate", *words, folder=folder)
    assert "ready" in program.stdout.readline()
    there = [each for each in Path("/proc").glob("[0-9]*") if is_in(each, folder)]
    (forked,) = {int(each.name) for each in there} - {program.pid}
    return program, forked


def is_in(process, folder):
    with contextlib.suppress(OSError):  # it has ended
        return (process / "cwd").readlink() == folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_a_forked_program_as_it_would_one_of_its_own(tmp_path, number):
    program, forked = serving(tmp_path)
    program.send_signal(number)
    assert program.wait(120) == -number
    until(lambda: not Path(f"/proc/{forked}").exists(), "the forked program is gone")
    program.communicate()


def test_a_module_that_is_another_than_the_checkouts_is_run_as_it_is(tmp_path):
    (folder := tmp_path / "training" / "node").mkdir(parents=True)
    (folder / "outline.py").write_text("import sys\nsys.exit('another' if 'torch' not in sys.modules else 'ours')\n")
    with start("training.node.outline", folder=tmp_path) as program:
        _, error = program.communicate(timeout=120)
    assert error == "another\n"


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_what_is_forked_also_starts_by_itself_and_imports_what_it_needs(name):
    """A fork has every import of its server, in the server's order."""
    environment = {key: value for key, value in os.environ.items() if key != ADDRESS} | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
