"""Python imports this in every process whose PYTHONPATH has this folder, before the program. `fab`, and what imports
torch, is forked from a server that has imported what takes it long (server.py); this process stands for it: its files,
folder and environment go there, its signals too, and it ends as the program does."""

import os
import sys

ADDRESS = "SPOTUNE_TEST_FORKS"
FAB = {"fabric": "fabric.__main__", "tests.support.paper_ssh": "tests.support.paper_ssh"}
CODE = {"forked": "", "forked.peft": "-peft"}
"""Names that `python -m NAME CODE` takes for `python -c CODE` of a server."""
FORK_SERVER = "training.node.supervision.fork_server"
PROGRAMS = frozenset(
    {
        FORK_SERVER,
        "deepspeed.launcher.launch",
        "tests.support.curve",
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


def stand_for(address, program, words):
    import contextlib
    import signal

    def pass_on(each, _):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, each)

    environment = os.environ | ({"PYTHONUNBUFFERED": "1"} if "-u" in sys.orig_argv else {})
    try:
        pid, connection = ask(address, program, words, [0, 1, 2], environment)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, pass_on)
        code = os.waitstatus_to_exitcode(number(connection))
    except ConnectionError as error:  # Python would go on, and run the program a second time
        print(error, file=sys.stderr, flush=True)
        os._exit(os.EX_SOFTWARE)
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


def forks_ours():
    """Whether the ranks of the run in the current folder, which a fork server would import, run such a program."""
    import json

    with open("launch.json", "rb") as launch:
        module = json.load(launch)["module"]
    return module in PROGRAMS and is_ours(module)


def begin():
    """Has this process stand for a forked one, where it is to run such a program as the servers would: they have no
    terminal."""
    address, argv = os.environ.get(ADDRESS), sys.orig_argv
    if not address or sys.stdout.encoding != "utf-8" or os.isatty(0):
        return
    if "PYTHONBREAKPOINT" in os.environ:  # a debugger's threads are not there in a fork
        return
    if os.path.basename("".join(argv[1:2])) == "fab":
        stand_for(f"{address}-fab", argv[1], argv[2:])
    elif argv[1:2] == ["-m"] and argv[2] in FAB:
        stand_for(f"{address}-fab", FAB[argv[2]], argv[3:])
    elif argv[1:2] == ["-m"] and argv[2] in CODE:
        stand_for(address + CODE[argv[2]], "-c", argv[3:])
    elif "-m" in argv[1:4] and os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":  # which the server has read
        after = argv.index("-m") + 1
        if argv[after] in PROGRAMS and is_ours(argv[after]) and (argv[after] != FORK_SERVER or forks_ours()):
            stand_for(address, argv[after], argv[after + 1 :])


begin()
