"""Python imports this in every process whose PYTHONPATH has this folder, before the program. One that imports torch is
forked from a server that has done so (server.py), which takes a hundredth of the time, and this process stands for it:
its files, folder and environment go there, its signals too, and it ends as the program does."""

import os
import sys

ADDRESS = "SPOTUNE_TEST_FORKS"
PROGRAMS = frozenset(
    {
        "deepspeed.launcher.launch",
        "training.models.tiny",
        "training.node.adapter.evaluate",
        "training.node.adapter.generate",
        "training.node.adapter.merge",
        "training.node.adapter.pipeline",
        "training.node.commcheck",
        "training.node.finetune",
        "training.node.look",
        "training.node.metrics.report",
        "training.node.outline",
        "training.node.prepare",
        "training.node.proof",
        "training.node.prove.agree",
        "training.node.prove.curve",
        "training.node.prove.walk",
    }
)


def ask(address, program, words, files, environment):
    """Has the server at an address start a program, a module's name or a path, with three files for its standard ones.
    Gives the program's number, and the connection that ends it where it is closed and tells its status."""
    import json
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + address)
    text = json.dumps([program, words, os.getcwd(), environment]).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], files)
    connection.sendall(text)
    return number(connection), connection


def number(connection):
    """The next that the server sends. Raises ConnectionError where it is gone: then nothing is known of the program."""
    sent = connection.recv(8)
    if len(sent) < 8:
        raise ConnectionError("the server of forked programs is gone")
    return int.from_bytes(sent, "big")


def stand_for(module, words):
    import signal

    environment = os.environ | ({"PYTHONUNBUFFERED": "1"} if "-u" in sys.orig_argv else {})
    pid, connection = ask(os.environ[ADDRESS], module, words, [0, 1, 2], environment)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, lambda each, _: os.kill(pid, each))
    code = os.waitstatus_to_exitcode(number(connection))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_ours(module):
    """Whether Python, which looks in the current folder first, would run the module of this checkout."""
    file = module.replace(".", "/") + ".py"
    if not os.path.exists(file):
        return True
    with open(file, "rb") as there, open(os.path.join(os.path.dirname(__file__), "..", "..", "..", file), "rb") as ours:
        return there.read() == ours.read()


# the server has read DS_ACCELERATOR
if os.environ.get(ADDRESS) and os.environ.get("DS_ACCELERATOR", "cpu") == "cpu" and "-m" in sys.orig_argv[1:4]:
    _after = sys.orig_argv.index("-m") + 1
    if sys.orig_argv[_after] in PROGRAMS and is_ours(sys.orig_argv[_after]):
        stand_for(sys.orig_argv[_after], sys.orig_argv[_after + 1 :])
