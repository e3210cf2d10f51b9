"""Asks the machine's metadata service whether this node is about to be reclaimed, and tells the head.

`python3 spot_watch.py --address 100.100.100.200 --node te3 --head te1`, for ever, as a systemd unit on every rented
node. Standard library only, Python 3.10 or newer: it runs by whatever python3 the node has.

The answer is 404 (or empty) until the cloud takes the machine back, then the time of that, five minutes ahead. It
becomes /run/spotune/reclaim/NODE.json {"node", "at", "noticed"} here and on the head, where the supervisor of a run
looks for it. /run is empty after a reboot, and so is the notice then. A machine that stays takes the notice of the one
whose name it has from the head: a run may start before that one's time has come.
"""

from __future__ import annotations

import argparse
import calendar
import http.client
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path("/run/spotune/reclaim")
TERMINATION = "/latest/meta-data/instance/spot/termination-time"
TOKEN, TOKEN_HEADER = "/latest/api/token", "X-aliyun-ecs-metadata-token"
TOKEN_TTL_S = 21600
"""The longest the service gives; asked for anew when half of it is over."""
EVERY_S = 5.0
ANSWER_S = 2.0
LONGEST_CALM_S = 300.0
"""Between two questions where nothing has ever answered: a machine without a metadata service."""
LONGEST_GAP_S = 20.0
"""The same where it has answered before: five minutes' notice must not be slept through."""
TELL_EVERY_S = 2.0
TELL_TIMEOUT_S = 15.0
TELL_LONGEST_S = 300.0
"""A notice nobody took for so long, and whose time has come, is given up."""
TIME = "%Y-%m-%dT%H:%M:%SZ"


class Unanswered(OSError):
    """The metadata service is not there, or says nothing that can be used."""


@dataclass(frozen=True)
class SpotNotice:
    """One node is taken back. Both times are UTC, as 2015-01-05T18:02:00Z."""

    node: str
    at: str
    noticed: str

    @property
    def text(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self)) + "\n"


@dataclass
class Metadata:
    """The instance metadata service: with a token (IMDSv2) where it gives one, else without. Never by a proxy."""

    address: str
    """Host, or host:port."""
    token: str = ""
    token_until: float = 0.0

    def termination_time(self) -> str:
        """When this machine is taken back, "" while it is not. Raises Unanswered."""
        self._refresh_token()
        status, body = self._ask("GET", TERMINATION, {TOKEN_HEADER: self.token} if self.token else {})
        if status in (401, 403) and self.token:  # forgotten by a service that was restarted
            self.token, self.token_until = "", 0.0
            self._refresh_token()
            status, body = self._ask("GET", TERMINATION, {TOKEN_HEADER: self.token} if self.token else {})
        if status == 404 or (status == 200 and not body):
            return ""
        if status != 200:
            raise Unanswered(f"the metadata service answers {status}")
        seconds(body)
        return body

    def _refresh_token(self) -> None:
        if time.monotonic() < self.token_until:
            return
        try:
            status, body = self._ask("PUT", TOKEN, {f"{TOKEN_HEADER}-ttl-seconds": str(TOKEN_TTL_S)})
        except Unanswered:  # its answer has a hop limit: behind a bridge only v1 may come through
            status, body = 0, ""
        # where there is no IMDSv2 the question goes without, and v2 is tried again later
        self.token = body if status == 200 and body.isascii() and body.isprintable() else ""
        self.token_until = time.monotonic() + (TOKEN_TTL_S / 2 if self.token else 60)

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_S)
        try:
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode("utf-8", errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(str(error) or type(error).__name__) from None
        finally:
            connection.close()


def seconds(text: str) -> float:
    """A time of the service in seconds since 1970. Raises Unanswered for what is none."""
    try:
        return calendar.timegm(time.strptime(text, TIME))
    except ValueError:
        raise Unanswered(f"the metadata service says {text[:60]!r} where a time should be") from None


def write(path: Path, text: str) -> None:
    """Put a file in place in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def put_command(folder: Path, node: str) -> str:
    """Shell for the head: what comes on standard input becomes the node's notice, in one go."""
    notice_file, temporary = shlex.quote(str(folder / f"{node}.json")), shlex.quote(str(folder / f".{node}.json.tmp"))
    return f"mkdir -p {shlex.quote(str(folder))} && cat >{temporary} && mv {temporary} {notice_file}"


def _on_head(head: str, command: str, text: str = "") -> str:
    """Run a command over the trust between the nodes, with `text` as its input; "" where it did, else why not."""
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "UpdateHostKeys=no")
    argv = ["ssh", *options, head, command]
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TELL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {TELL_TIMEOUT_S:.0f} s"
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


@dataclass
class SpotWatch:
    """One node's watch. Everything worth remembering is in the folder: it may be ended and started at any time."""

    node: str
    head: str
    metadata: Metadata
    folder: Path = FOLDER
    clock: Callable[[], float] = time.time
    answered: bool = False
    misses: int = 0
    withdrawn: bool = False
    """Whether the head has nothing of an earlier machine of this name."""
    said: set[str] = field(default_factory=set)

    def step(self) -> float:
        """Ask once, and do what follows; gives the seconds until the next step."""
        try:
            at = self.metadata.termination_time()
        except Unanswered as error:
            self._say_once(f"no answer from {self.metadata.address}: {error}")
            self.misses += 1
            pause = self._calm_s()
        else:
            self.answered, self.misses, pause = True, 0, EVERY_S
            if at:
                self._note(at)
            else:
                self._withdraw()
        return pause if self._delivered() else min(pause, TELL_EVERY_S)

    def _calm_s(self) -> float:
        longest = LONGEST_GAP_S if self.answered else LONGEST_CALM_S
        return min(longest, EVERY_S * 2.0 ** min(self.misses - 1, 10))

    def _note(self, at: str) -> None:
        """Write a notice down, unless it is there already."""
        known = self._read(".json")
        if known is None or known.at != at:
            now = time.strftime(TIME, time.gmtime(self.clock()))
            write(self._file(".json"), SpotNotice(self.node, at, now).text)
            print(f"{self.node} is reclaimed at {at}", flush=True)

    def _withdraw(self) -> None:
        """Once, while this machine has had no notice of its own."""
        if self.withdrawn or self.node == self.head or self._read(".json") is not None:
            return
        if reason := _on_head(self.head, f"rm -f {shlex.quote(str(self._file('.json')))}"):
            self._say_once(f"{self.head} could not be asked to forget an earlier {self.node}: {reason}")
        self.withdrawn = not reason

    def _delivered(self) -> bool:
        """Whether nothing is left to tell the head; tries to."""
        notice = self._read(".json")
        if notice is None or self.node == self.head or self._read(".told") == notice:
            return True
        if self.clock() > max(seconds(notice.at), seconds(notice.noticed) + TELL_LONGEST_S):
            return True
        if reason := _on_head(self.head, put_command(self.folder, notice.node), notice.text):
            self._say_once(f"{self.head} could not be told: {reason}")
            return False
        write(self._file(".told"), notice.text)
        print(f"{self.head} knows", flush=True)
        return True

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.node}{suffix}"

    def _read(self, suffix: str) -> SpotNotice | None:
        try:
            return SpotNotice(**json.loads(self._file(suffix).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Watch until ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="of the metadata service: host, or host:port")
    parser.add_argument("--node", required=True, help="this node's name")
    parser.add_argument("--head", required=True, help="the head's name")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    os.umask(0o022)
    watch = SpotWatch(options.node, options.head, Metadata(options.address), options.folder)
    while True:
        time.sleep(watch.step())


if __name__ == "__main__":
    main()
