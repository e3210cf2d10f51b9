"""What spotune's launcher starts once per node: it imports the ranks' program once and forks a process for each rank.

    python -m training.node.supervision.fork_server --run DIR --node NAME

waits for a line on standard input, the port where the ranks meet, and passes on what they say (rank_process.py). At the
end of standard input it kills them: whoever watches over them is gone. What it imported stays on the node, for the
ranks that follow (spare_server.py); with --ahead that is all it does. Without --node it waits for nothing: then it runs
by hand or by a scheduler, whose variables (training/run/place.py) say which node this is.

A fork that began to use the GPU's driver, or that has threads of Python, would not be whole: where the imports do
that, each rank imports the program by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from training.node.supervision.rank_process import (
    RankProcess,
    die_with,
    environment_of,
    fork_rank,
    launcher_code,
    of_login,
    watch,
)
from training.node.supervision.spare_server import leave_spare, taken_over
from training.run.environment import left_out
from training.run.events import RUN_VARIABLE
from training.run.folder import LAUNCH, RECIPE
from training.run.launch import Launch, parse_launch
from training.run.launchers import place_variables
from training.run.place import NodePlace, PlaceError, RankPlace, node_place_of

_CUDA_NOT_INITIALIZED = 3
_MEMINFO = Path("/proc/meminfo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--node", default="")
    parser.add_argument("--ahead", action="store_true", help="only leave a spare server")
    arguments = parser.parse_args()
    run_dir, watched = arguments.run.resolve(), bool(arguments.node)
    launch = _read(run_dir)
    stays = watched and not launch.here
    if stays and (code := taken_over(arguments.node)) is not None:
        return code
    place = None if watched else _place_by_hand(launch)
    if place and RUN_VARIABLE not in os.environ:
        _run_clean(launch, run_dir, place)
    of_node = dict(os.environ) if launch.here else of_login()
    env = environment_of(launch, of_node)
    _set_environment(env)
    with suppress(OSError):
        if len(launch.hosts) == 1:  # of several, each needs a part, and which is not planned yet
            read_ahead(_weights(launch))
    program = _imported(launch.module)
    if place is None:
        line = "" if arguments.ahead else sys.stdin.readline()
        if program and stays and (line or arguments.ahead) and leave_spare(arguments.node):
            line = sys.stdin.readline()
        if not line:
            return 0
        begun, launch = launch, _read(run_dir)  # which was planned meanwhile
        if (launch.module, environment_of(launch, of_node)) != (begun.module, env):
            program = None
            _set_environment(environment_of(launch, of_node))
        number = next(number for number, host in enumerate(launch.hosts) if host.name == arguments.node)
        place = NodePlace(number, launch.master_address, int(line))
    host = launch.hosts[place.number]
    if not launch.here and (names := left_out(launch.env, of_node)):
        print(f"of {host.name}'s environment its ranks do not get", *names, flush=True)
    ranks, numbers = list[RankProcess](), launch.ranks_of(host.name)
    for local_rank, rank in enumerate(numbers):
        process = fork_rank(rank, run_dir)
        if process is None:
            for each in ranks:
                each.close()
            mine = RankPlace(rank, launch.world_size, local_rank, host.slots, place.master_address, place.master_port)
            os.environ |= place_variables(launch, mine)
            return _run(launch, program)
        ranks.append(process)
    codes = watch(ranks, attached=sys.stdin.fileno() if watched else None)
    return 0 if watched else max(map(launcher_code, codes))


def _place_by_hand(launch: Launch) -> NodePlace:
    try:
        return node_place_of(os.environ, len(launch.hosts), launch.master_address)
    except PlaceError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _run_clean(launch: Launch, run_dir: Path, place: NodePlace) -> None:
    """Once more, with the mark of the run and without what a login or a scheduler has set."""
    env = dict(os.environ) if launch.here else {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"NODE_RANK": str(place.number), "NNODES": str(len(launch.hosts)), RUN_VARIABLE: str(run_dir)}
    env |= {"MASTER_ADDR": place.master_address, "MASTER_PORT": str(place.master_port)}
    os.execve(sys.executable, [sys.executable, "-u", "-m", str(__spec__.name), "--run", str(run_dir)], env)


def _read(run_dir: Path) -> Launch:
    return parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _imported(module: str) -> ModuleType | None:
    """The ranks' program with all it imports; None where a rank has to import it by itself, and says why it cannot."""
    gc.disable()  # what is imported stays: to look for garbage in it would take a tenth of the time
    try:
        program = importlib.import_module(module)
    except (Exception, SystemExit):
        return None
    finally:
        gc.freeze()  # a collection in a rank must not copy the pages of what is shared
        gc.enable()
    return program if threading.active_count() == 1 and not driver_started() else None


def _weights(launch: Launch) -> list[Path]:
    """The files of the base model that the run is to learn from; none for a program that has no recipe."""
    recipe = Path(launch.run_dir) / RECIPE
    folder = tomllib.loads(recipe.read_text(encoding="utf-8")).get("model_dir") if recipe.exists() else None
    return sorted((Path(launch.models) / str(folder)).glob("*.safetensors")) if folder else []


def read_ahead(files: Sequence[Path]) -> None:
    """Have a process of its own ask the kernel for files meanwhile: from a cold disk a model takes minutes.
    Nothing where they would fill more than half of the memory that is available. Raises OSError."""
    memory = dict(line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    half, parent = int(memory["MemAvailable"].split()[0]) * 1024 / 2, os.getpid()
    if not files or sum(file.stat().st_size for file in files) > half or os.fork():
        return
    try:
        die_with(parent)
        os.closerange(0, 3)  # whoever reads what the ranks say does not wait for this one
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for source in (os.open(file, os.O_RDONLY) for file in files):
            at = 0
            while sent := os.sendfile(nowhere, source, at, 16 << 20):  # copies nothing; posix_fadvise ends early
                at += sent
    finally:
        os._exit(0)


def driver_started() -> bool:
    """Whether this process has begun to use the GPU's driver, which no fork of it could go on with."""
    if "libcuda.so" not in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"):
        return False
    count = ctypes.c_int()
    return int(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))) != _CUDA_NOT_INITIALIZED


def _run(launch: Launch, program: ModuleType | None) -> int:
    """The ranks' program, in the rank."""
    words = ["--run", launch.run_dir, *launch.arguments]
    if program is None:
        os.execv(sys.executable, [sys.executable, "-u", "-m", launch.module, *words])
    sys.argv = [str(program.__file__), *words]
    return int(program.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
