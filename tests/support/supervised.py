"""A supervisor with real ranks on this machine that run small programs, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.support.forks.sitecustomize import ADDRESS
from tests.support.waiting import until
from training.laptop.new_run import launch_files
from training.node.supervision.end_processes import processes_of
from training.run.environment import here_env
from training.run.events import EVENTS, Started, parse_rows
from training.run.folder import Status, parse_status
from training.run.launch import Host, Launch

SOURCE = Path(__file__).parents[2] / "training"

LOCALHOST = (Host("localhost", "127.0.0.1", 2),)

PROGRAMS = {
    "finishes": "print('done', rank)",
    "shows_its_environment": """
        print('omp', AT_IMPORT, 'run', os.environ['SPOTUNE_RUN'])
        print('parent', os.getppid())
    """,
    "trains": """
        from training.node import finetune
        sys.argv[1:] = ['--run', str(run)]
        finetune.main()
    """,
    "leaves_at_once": "sys.stdout.flush(); os._exit(0)",
    "waits": """
        print('waiting', rank, 'of', os.environ['WORLD_SIZE'], *sys.argv[3:], flush=True)
        wait_until((run / 'stop').exists)
        time.sleep(0.5 * rank)
        (run / f'saved-{rank}').touch()
        sys.exit(3)
    """,
    "saves_a_checkpoint": """
        print('waiting', rank, 'of', os.environ['WORLD_SIZE'], *sys.argv[3:], flush=True)
        wait_until((run / 'stop').exists)
        (run / 'checkpoints' / 'step-30').mkdir(parents=True, exist_ok=True)
        (run / 'checkpoints' / 'step-6').mkdir(parents=True, exist_ok=True)
        (run / f'saved-{rank}').touch()
        sys.exit(3)
    """,
    "breaks_with_three": """
        if os.environ['WORLD_SIZE'] == '3' and rank == 2: raise ValueError('it is not fit')
        print('waiting', rank, 'of', os.environ['WORLD_SIZE'], *sys.argv[3:], flush=True)
        wait_until((run / 'stop').exists)
        (run / 'checkpoints' / 'step-30').mkdir(parents=True, exist_ok=True)
        sys.exit(3)
    """,
    "takes_steps": """
        from datetime import UTC, datetime
        from training.node.diagnosis.progress import STEP, ProgressFile
        kept, progress = 2 if '--resume' in sys.argv else 0, ProgressFile(run, rank)
        for step in range(kept, kept + 5):
            progress.enter(step, STEP)
            row = {'step': step, 'loss': 1.0, 'step_s': 0.25, 'time': datetime.now(UTC).isoformat()}
            if rank == 0 and step > kept: (run / 'metrics.jsonl').open('a').write(json.dumps(row) + '\\n')
            if rank == 0 and step == 2: (run / 'checkpoints' / 'step-2').mkdir(parents=True, exist_ok=True)
        print('stepped', rank, 'of', os.environ['WORLD_SIZE'], flush=True)
        wait_until((run / 'stop').exists)
        sys.exit(3)
    """,
    "starts_slowly": """
        wait_until((run / 'stop').exists)
        (run / 'checkpoints' / 'step-1').mkdir(parents=True, exist_ok=True)
        sys.exit(3)
    """,
    "steps_slowly": """
        from training.node.diagnosis.progress import STEP, ProgressFile
        progress = ProgressFile(run, rank)
        for step in range(1000):
            progress.enter(step, STEP)
            if (run / 'stop').exists() and step > 3: break
            time.sleep(0.7 if step < 3 else 6)
            if step == 2: print('slow', rank, flush=True)
        (run / f'saved-{rank}').touch()
        sys.exit(3)
    """,
    "is_slower_than_planned": """
        from training.run.events import OffPlan, emit
        if rank == 0: emit(OffPlan(8, 10.0, 14.5))
        print('slow', rank, flush=True)
        wait_until((run / 'stop').exists)
        sys.exit(3)
    """,
    "diverges": """
        from training.run.events import Failed, emit
        if rank == 1: emit(Failed('diverged', 'the loss is nan')); print('@{"event": "ended", "code": 0}'); sys.exit(1)
        stay()
    """,
    "is_cut_off": """
        if rank == 1: (run.parent / 'down' / 'te2.cut').touch()
        stay()
    """,
    "is_deaf": "print('deaf', flush=True); stay()",
    "raises": """
        if rank == 1: raise ValueError('the seventh sample is odd')
        stay()
    """,
    "fills_the_disk": """
        if rank == 1: (run / 'full').touch(); raise OSError(28, 'No space left on device')
        wait_until((run / 'full').exists); raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')
    """,
    "loses_a_peer": """
        if rank == 0: raise RuntimeError('Connection closed by peer [127.0.0.1]:1234')
        wait_until(lambda: (run / EVENTS).exists() and '"ended"' in (run / EVENTS).read_text())
        os.kill(os.getpid(), 9)
    """,
    "cannot_save": """
        wait_until((run / 'stop').exists)
        if rank == 0: raise OSError(28, 'No space left on device')
        sys.exit(3)
    """,
    "cannot_be_used": """
        if rank == 1: stay()
        from training.run.events import Failed, emit
        print('one more thing'); emit(Failed('unusable', 'recipe x: steps: no such key')); sys.exit(2)
    """,
    "leaves_children": """
        import subprocess
        subprocess.Popen(['sleep', '600'], start_new_session=True)
        sys.exit(11 if rank == 1 else 0)  # no code of ours
    """,
}
"""What a rank does; `rank` and `run` are given, and what PROGRAM imports."""

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from training.run.events import EVENTS

AT_IMPORT = os.environ['OMP_NUM_THREADS']
Path({run!r}, 'imports').open('a').write('.')

def wait_until(condition):
    while not condition(): time.sleep(0.1)

def stay():
    while True: signal.pause()

def main():
    rank, run = int(os.environ['RANK']), Path({run!r})
{body}

if __name__ == '__main__':
    main()
"""


@contextmanager
def supervisors(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, subprocess.Popen[bytes]]]]:
    """Start a supervisor of two ranks that run one of PROGRAMS; its launcher is forked unless `forked` is False, as
    where processes of the run are to be found and ended."""
    started: list[subprocess.Popen[bytes]] = []
    run_dir = tmp_path / "tiny-20260101-000000"

    def start(
        program: str,
        *,
        stop_grace_s: int = 20,
        hosts: tuple[Host, ...] = LOCALHOST,
        here: bool = True,
        forked: bool = True,
        data_disk: str = "",
        models: str = "",
        deploy: str = "",
        launcher: str = "spotune",
        early: bool = False,
        before: Callable[[Path], None] = lambda run_dir: None,
    ) -> tuple[Path, subprocess.Popen[bytes]]:
        shutil.copytree(SOURCE, run_dir / "training", ignore=shutil.ignore_patterns("__pycache__"))
        body = indent(dedent(PROGRAMS[program]), "    ")
        (run_dir / "training" / "program.py").write_text(PROGRAM.format(run=str(run_dir), body=body))
        env = here_env(str(run_dir), str(Path(sys.executable).parent), os.environ["PATH"], False, str(tmp_path))
        launch = Launch(
            run_id=run_dir.name,
            run_dir=str(run_dir),
            hosts=hosts,
            module="training.program",
            arguments=(),
            python=sys.executable,
            env=env,
            here=here,
            stop_grace_s=stop_grace_s,
            data_disk=data_disk,
            deploy=deploy,
            launcher=launcher,
            price_h=sum(host.price_h or 0.0 for host in hosts) or None,
            **({"models": models} if models else {}),
        )
        for name, text in launch_files(launch).items():
            (run_dir / name).write_text(text)
        before(run_dir)
        more = ["--notices", str(tmp_path / "notices"), *(["--early"] if early else [])]
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "training.node.supervision.supervise", "--run", str(run_dir), *more],
            cwd=run_dir,
            env={name: value for name, value in os.environ.items() if forked or name != ADDRESS},
        )
        started.append(supervisor)
        return run_dir, supervisor

    yield start
    for supervisor in started:
        supervisor.kill()
        supervisor.wait()
    for pid in processes_of(str(run_dir)):
        os.kill(pid, signal.SIGKILL)


def status_of(run_dir: Path) -> Status:
    return parse_status((run_dir / "status.json").read_text())


def pid_of_rank(run_dir: Path, rank: int) -> int:
    """The program's own pid, as the rank start announced it."""
    told = parse_rows((run_dir / EVENTS).read_text())
    return next(each.event.pid for each in told if each.rank == rank and isinstance(each.event, Started))


def wait_for_output(run_dir: Path, rank: int, text: str) -> None:
    log = run_dir / "logs" / f"rank-{rank}.log"
    until(lambda: log.exists() and text in log.read_text())


FAKE_SSH = """#!/bin/sh
# stands in for ssh: runs the command here, on whatever node it was meant for
while [ $# -gt 0 ]; do
  case "$1" in
    -G) [ -e "$SPOTUNE_TEST_DOWN/$2" ] && exit 255; echo "port 1"; exit 0 ;;
    -o|-l|-p|-i) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
host=$1; shift
down=$SPOTUNE_TEST_DOWN/$host
[ -e "$down" ] && { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
command="$*"  # a node that is `apart` has processes of its own, and none of the others'
[ -e "$down.apart" ] && command=$(printf %s "$command" | sed "s#end_processes --run [^ ;)]*#&.$host#")
[ -e "$down.unfit" ] && case $command in *end_processes*) echo "it has no disk" >&2; exit 1 ;; esac
exec 3<&0
setsid sh -c "$command" <&3 &
while kill -0 $! 2>/dev/null; do
  if [ -e "$down" ] || rm "$down.cut" 2>/dev/null; then
    kill -9 -$!; echo "Timeout, server $host not responding." >&2; exit 255
  fi
  sleep 0.2
done
wait $!
"""


def on_two_nodes(start, tmp_path: Path, monkeypatch) -> Callable[..., tuple[Path, subprocess.Popen[bytes]]]:
    """One rank on each of two nodes, with a stand-in for ssh: real fork servers, or DeepSpeed's runner over pdsh."""
    if shutil.which("pdsh") is None or shutil.which("rsync") is None:
        pytest.skip("needs pdsh and rsync")
    tools, down = tmp_path / "tools", tmp_path / "down"
    tools.mkdir()
    down.mkdir()
    (tools / "ssh").write_text(FAKE_SSH)
    (tools / "ssh").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("SPOTUNE_TEST_DOWN", str(down))
    hosts = (Host("te1", "127.0.0.1", 1), Host("te2", "127.0.0.1", 1))
    return lambda program, **more: start(program, here=False, **{"hosts": hosts, "data_disk": "/", **more})
