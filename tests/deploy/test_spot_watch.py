"""The watcher for the cloud's notice, as a program: against a metadata service over HTTP, with a stand-in for ssh."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.on_node import spot_watch
from deploy.on_node.spot_watch import TERMINATION, TIME, Metadata, SpotNotice, SpotWatch, Unanswered, put_command
from tests.support.waiting import until

SCRIPT = Path(spot_watch.__file__)
HEADER = "X-aliyun-ecs-metadata-token"


class Service(ThreadingHTTPServer):
    """Instance metadata as documented: 404 or a time at one path, tokens on request, v1 where it is let."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.at: str | None = None
        self.tokens: set[str] = set()
        self.gives_tokens = True
        self.needs_token = True
        self.asked: list[tuple[str, str]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def questions(self) -> int:
        return sum(method == "GET" for method, _ in self.asked)


class Answers(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        self.server.asked.append(("PUT", self.path))
        ttl = self.headers.get(f"{HEADER}-ttl-seconds", "")
        if not self.server.gives_tokens or not (ttl.isdigit() and 1 <= int(ttl) <= 21600):
            return self._answer(405, "")
        self.server.tokens.add(f"token-{len(self.server.tokens)}")
        self._answer(200, f"token-{len(self.server.tokens) - 1}")

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        token = self.headers.get(HEADER)
        if token not in self.server.tokens and (token or self.server.needs_token):
            return self._answer(401 if token else 403, "")
        if self.path != TERMINATION or self.server.at is None:
            return self._answer(404, "<title>404 - Not Found</title>")
        self._answer(200, self.server.at)

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """The service keeps its own record."""


@pytest.fixture
def service() -> Iterator[Service]:
    served = Service()
    threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


# The head is a folder here; while its file `down` is there it does not answer.
SSH = """#!/bin/sh
echo "$@" >> {there}/argv
[ -e {there}/down ] && {{ echo "ssh: connect to host te1 port 22: No route to host" >&2; exit 255; }}
while [ "$1" != te1 ]; do shift; done
shift
exec sh -c "$(echo "$*" | sed 's#{here}#{there}#g')"
"""


class Node:
    """te3: its folder, its head te1, and its watcher as a process."""

    def __init__(self, tmp_path: Path, service: Service) -> None:
        self.service = service
        self.here, self.there = tmp_path / "here", tmp_path / "there"
        self.there.mkdir()
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(SSH.format(here=self.here, there=self.there))
        ssh.chmod(0o755)
        # a proxy that is not there: who asked it would get no answer
        self.env = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "http_proxy": "http://127.0.0.1:9"}
        self.started: list[subprocess.Popen[str]] = []

    def watch(self) -> subprocess.Popen[str]:
        words = ["--address", self.service.address, "--node", "te3", "--head", "te1", "--folder", str(self.here)]
        # the pace is the program's own, made quick: everything else is as it is installed
        quick = "import deploy.on_node.spot_watch as w; w.EVERY_S = w.TELL_EVERY_S = 0.1; w.main()"
        process = subprocess.Popen([sys.executable, "-c", quick, *words], env=self.env, text=True)
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()

    def told(self) -> dict[str, str] | None:
        """What the head knows."""
        path = self.there / "te3.json"
        return json.loads(path.read_text()) if path.exists() else None

    def calls(self) -> int:
        path = self.there / "argv"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def node(tmp_path: Path, service: Service) -> Iterator[Node]:
    made = Node(tmp_path, service)
    yield made
    made.end()


def in_five_minutes(more_s: float = 0) -> str:
    return time.strftime(TIME, time.gmtime(time.time() + 300 + more_s))


def test_a_machine_that_nobody_wants_back_writes_and_says_nothing(node: Node, service: Service) -> None:
    node.watch()
    until(lambda: service.questions() > 3)
    assert not node.here.exists() or list(node.here.iterdir()) == []
    assert node.calls() == 1, "the head forgets an earlier te3 once"
    assert [method for method, _ in service.asked].count("PUT") == 1, "one token serves many questions"


def test_a_notice_is_written_here_and_on_the_head_once(node: Node, service: Service) -> None:
    node.watch()
    until(lambda: service.questions() > 1)
    service.at, began = in_five_minutes(), time.time()
    until(node.told)
    asked = service.questions()
    until(lambda: service.questions() > asked + 5)
    here = json.loads((node.here / "te3.json").read_text())
    assert here == node.told()
    assert (here["node"], here["at"]) == ("te3", service.at)
    assert int(began) <= spot_watch.seconds(here["noticed"]) <= time.time()
    assert node.calls() == 2, "once before it, once with it"
    assert "BatchMode=yes" in (node.there / "argv").read_text()


def test_a_machine_that_stays_takes_the_notice_of_the_one_before_it_from_the_head(node: Node, service: Service) -> None:
    others = node.there / "te2.json"
    earlier = SpotNotice("te3", in_five_minutes(900), in_five_minutes(-300)).text
    for notice in (others, node.there / "te3.json"):
        notice.write_text(earlier)
    (node.there / "down").touch()
    node.watch()
    until(lambda: node.calls() > 1)
    assert node.told(), "the head could not be asked yet"
    (node.there / "down").unlink()
    until(lambda: node.told() is None)
    assert others.exists()
    service.at = in_five_minutes()
    until(node.told)
    asked = service.questions()
    until(lambda: service.questions() > asked + 3)
    assert (node.told() or {})["at"] == service.at, "its own stays"


def test_the_head_is_told_until_it_hears(node: Node, service: Service) -> None:
    (node.there / "down").touch()
    service.at = in_five_minutes()
    node.watch()
    until(lambda: node.calls() > 2)
    assert node.told() is None
    (node.there / "down").unlink()
    until(node.told)


def test_a_watcher_killed_before_it_told_the_head_does_so_afterwards_and_then_no_more(
    node: Node, service: Service
) -> None:
    (node.there / "down").touch()
    service.at = in_five_minutes()
    first = node.watch()
    until(lambda: node.calls() > 0)
    first.kill()
    first.wait()
    noticed = json.loads((node.here / "te3.json").read_text())
    (node.there / "down").unlink()
    calls = node.calls()
    second = node.watch()
    until(node.told)
    assert node.told() == noticed
    until((node.here / "te3.told").exists)
    second.kill()
    second.wait()
    asked = service.questions()
    node.watch()
    until(lambda: service.questions() > asked + 5)
    assert node.calls() == calls + 1


def test_a_time_that_moves_is_told_again(node: Node, service: Service) -> None:
    service.at = in_five_minutes()
    node.watch()
    until(node.told)
    service.at = in_five_minutes(60)
    until(lambda: (node.told() or {}).get("at") == service.at)


def test_a_forgotten_token_is_asked_for_again_and_a_service_without_tokens_is_asked_without(service: Service) -> None:
    metadata = Metadata(service.address)
    assert metadata.termination_time() == ""
    service.tokens.clear()
    service.at = in_five_minutes()
    assert metadata.termination_time() == service.at
    older = Metadata(service.address)
    service.gives_tokens = service.needs_token = False
    assert older.termination_time() == service.at
    assert older.token == ""


def test_an_empty_answer_is_no_notice_and_one_that_is_no_time_is_no_answer(service: Service) -> None:
    service.at = ""
    assert Metadata(service.address).termination_time() == ""
    service.at = "<html>please log in</html>"
    with pytest.raises(Unanswered, match="please log in"):
        Metadata(service.address).termination_time()


def test_where_no_service_is_the_watcher_calms_down_and_where_one_was_it_stays_awake(
    tmp_path: Path, service: Service
) -> None:
    nothing = SpotWatch("te3", "te1", Metadata("127.0.0.1:9"), tmp_path)
    pauses = [nothing.step() for _ in range(9)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    there = SpotWatch("te3", "te1", Metadata(service.address), tmp_path, withdrawn=True)
    assert there.step() == 5
    there.metadata = Metadata("127.0.0.1:9")
    assert [there.step() for _ in range(5)] == [5, 10, 20, 20, 20]


def test_a_silent_service_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for until the limit of a test's time."""
    monkeypatch.setattr(spot_watch, "ANSWER_S", 0.2)
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        watch = SpotWatch("te3", "te1", Metadata(f"127.0.0.1:{deaf.getsockname()[1]}"), tmp_path)
        assert watch.step() == spot_watch.EVERY_S and watch.misses == 1


def test_a_notice_nobody_takes_is_given_up_when_its_time_has_come(tmp_path: Path, service: Service) -> None:
    service.at = in_five_minutes()
    now = time.time()
    watch = SpotWatch("te3", "te1.invalid", Metadata(service.address), tmp_path, clock=lambda: now)
    assert watch.step() == spot_watch.TELL_EVERY_S
    now += 302
    assert watch.step() == spot_watch.EVERY_S


def test_the_heads_own_notice_stays_where_it_is(tmp_path: Path, service: Service, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no ssh to be found
    service.at = in_five_minutes()
    watch = SpotWatch("te1", "te1", Metadata(service.address), tmp_path / "reclaim")
    assert watch.step() == spot_watch.EVERY_S
    assert [path.name for path in (tmp_path / "reclaim").iterdir()] == ["te1.json"]


def test_the_heads_shell_puts_a_notice_in_place_whole(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    notice = SpotNotice("te3", "2026-01-31T12:03:00Z", "2026-01-31T11:58:00Z")
    subprocess.run(["sh", "-c", put_command(folder, "te3")], input=notice.text, text=True, check=True)
    assert [path.name for path in folder.iterdir()] == ["te3.json"]
    assert SpotNotice(**json.loads((folder / "te3.json").read_text())) == notice


def test_the_watcher_needs_only_the_standard_library_of_python_3_10() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 10))
    roots = {name.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for name in n.names}
    roots |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert roots <= sys.stdlib_module_names
