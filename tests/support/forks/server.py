"""Forks programs that tests start, from one process that has imported what takes them long (sitecustomize.py asks it):

    python -m tests.support.forks.server NUMBER MODULE ...

takes requests at the listening socket of that number, and imports the modules at the first. It ends with whoever holds
its standard input."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).parents[3]
OURS = frozenset({"deploy", "inventory", "snapshots", "training"})


def serve(listener, modules):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # minders are reaped by the kernel
    imported = False
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not imported:
            import_all(modules)
            imported = True
        if os.fork() == 0:
            listener.close()
            mind(connection)
        connection.close()


def import_all(modules):
    logging.disable(logging.WARNING)  # bitsandbytes says what it has no kernel for
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:  # of an extra that is not installed
            if str(missing.name).partition(".")[0] in OURS:
                raise
    logging.disable(logging.NOTSET)
    if slow_imports := sys.modules.get("training.node.slow_imports"):
        slow_imports.all_imported()
    known = 0
    while known < len(sys.modules):  # the deferred ones import others
        known = len(sys.modules)
        for module in ours():
            _ = sys.modules[module].__doc__
    gc.collect()
    gc.freeze()  # what every fork shares is looked through by none


def ours():
    return [name for name in sys.modules if name.partition(".")[0] in OURS]


def mind(connection):
    """Starts one program, tells its number and its end, and ends it where whoever asked for it is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    if (pid := os.fork()) == 0:
        connection.close()
        become(files, *request)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(8, "big"))
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "big"))
    os._exit(0)


def become(files, program, words, folder, environment):
    """In the fork, from where on it is the program."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in environment)
    if not is_of(folder):
        for name in ours():
            del sys.modules[name]
    sys.argv = [program, *words]
    code = 0
    try:
        if program == "-c":
            sys.path[0], sys.argv = "", ["-c", *words[1:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(words[0], vars(main))
        elif os.sep in program:
            sys.path[0] = str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
        else:
            sys.path[0] = folder
            sys.modules.pop(program, None)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_of(folder):
    """Whether what runs in a folder has this checkout's modules, and not those of a copy."""
    there = Path(folder, "training")
    return not there.exists() or there.samefile(ROOT / "training")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
