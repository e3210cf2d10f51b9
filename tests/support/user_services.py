"""A stand-in for the user's systemd, where none runs: `systemctl --user enable --now UNIT` starts the unit's command
with the unit's environment and nothing else of the caller's, as systemd does."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

SYSTEMCTL = """#!{python}
import os, sys
sys.path[:0] = [{root!r}]
from tests.support.user_services import systemctl
sys.exit(systemctl(sys.argv[1:], {folder!r}))
"""


@contextmanager
def stand_in(folder: Path):
    """`systemctl` in a folder, which is to be the first of PATH; what it has started ends with this."""
    folder.mkdir()
    text = SYSTEMCTL.format(python=sys.executable, root=str(Path(__file__).parents[2]), folder=str(folder))
    (folder / "systemctl").write_text(text)
    (folder / "loginctl").write_text("#!/bin/sh\necho no\n")
    for name in ("systemctl", "loginctl"):
        (folder / name).chmod(0o755)
    try:
        yield folder
    finally:
        if (pid := folder / "pid").exists():
            with suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)


def systemctl(argv, folder):
    with Path(folder, "calls").open("a") as calls:
        print(*argv, file=calls)
    if Path(folder, "broken").exists():
        print("Failed to connect to bus: No medium found", file=sys.stderr)
        return 1
    if argv[1:3] == ["enable", "--now"]:
        start(Path(argv[3]), Path(folder))
    return 0


def start(unit, folder):
    """The unit's command, its output in `folder`/output, its exit code in `folder`/code once it has ended."""
    pairs = [line.partition("=")[::2] for line in unit.read_text().splitlines() if "=" in line]
    values = dict(pairs)
    environment = dict(shlex.split(value)[0].partition("=")[::2] for key, value in pairs if key == "Environment")
    command = shlex.join(word.replace("$$", "$") for word in shlex.split(values["ExecStart"]))
    started = subprocess.Popen(
        ["/bin/sh", "-c", f"{command} > {folder}/output 2>&1; echo $? > {folder}/code"],
        cwd=values["WorkingDirectory"].replace("%%", "%"),
        env={name: value.replace("%%", "%") for name, value in environment.items()},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (folder / "pid").write_text(str(started.pid))
