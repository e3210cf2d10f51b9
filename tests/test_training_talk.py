"""Talking with a program, on this machine and over a real ssh channel: it ends when its input does."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import paramiko
import pytest

from training.control.head_node import RemoteHead
from training.control.talk import Talk, TalkBroken, TalkRefused, talk_here

ECHO = """
import json, sys, warnings
warnings.warn("something to stderr")
print(json.dumps({"ready": 1}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked == "leave": sys.exit(0)
    if asked == "mistake": print(json.dumps({"mistake": "no such thing"}), flush=True); sys.exit(2)
    if asked == "break": sys.exit("it is broken")
    print(json.dumps({"heard": asked}, ensure_ascii=False), flush=True)
"""
COMMAND = f"exec env PYTHONIOENCODING=utf-8 {shlex.quote(sys.executable)} -c {shlex.quote(ECHO)}"


class Sshd(paramiko.ServerInterface):
    """As sshd does: the channel is the program's input and output, and closing it closes these."""

    def __init__(self) -> None:
        self.programs: list[subprocess.Popen[bytes]] = []

    def check_auth_none(self, username):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        program = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.programs.append(program)
        threading.Thread(target=self._hear, args=(channel, program), daemon=True).start()
        threading.Thread(target=self._tell, args=(channel, program), daemon=True).start()
        return True

    def _hear(self, channel, program):
        while data := channel.recv(4096):
            program.stdin.write(data)
            program.stdin.flush()
        program.stdin.close()

    def _tell(self, channel, program):
        while data := program.stdout.read1(4096):
            with contextlib.suppress(OSError):  # nobody listens any more
                channel.sendall(data)
        channel.send_exit_status(program.wait())
        program.stdout.close()
        channel.close()


class Door:
    """What a RemoteHead asks of a connection, over a real transport."""

    user = "root"

    def __init__(self, sshd: Sshd) -> None:
        self.client = self
        ours, theirs = socket.socketpair()
        self.server = paramiko.Transport(theirs)
        self.server.add_server_key(paramiko.ECDSAKey.generate())
        self.server.start_server(event=threading.Event(), server=sshd)
        self.transport = paramiko.Transport(ours)
        self.transport.start_client()
        self.transport.auth_none("root")

    def get_transport(self):
        return self.transport

    def close(self):
        self.transport.close()
        self.server.close()


@pytest.fixture(params=["here", "over ssh"])
def talk(request: pytest.FixtureRequest) -> Iterator[Talk]:
    if request.param == "here":
        with talk_here(COMMAND) as opened:
            yield opened
        return
    sshd = Sshd()
    head = RemoteHead("te1", lambda: Door(sshd), lambda *_: "")
    with closing(head), head.talk(COMMAND) as opened:
        yield opened
    for program in sshd.programs:
        program.wait(5)


def test_lines_go_both_ways_in_any_script(talk: Talk):
    messages = talk.messages()
    assert next(messages) == {"ready": 1}
    talk.send({"text": "你好\n世界"})
    assert next(messages) == {"heard": {"text": "你好\n世界"}}
    talk.send("leave")
    assert list(messages) == []


def test_a_mistake_is_the_programs_own_sentence(talk: Talk):
    messages = talk.messages()
    next(messages)
    talk.send("mistake")
    with pytest.raises(TalkRefused, match=r"^no such thing$"):
        next(messages)


def test_a_failure_has_the_last_words_and_the_code(talk: Talk):
    messages = talk.messages()
    next(messages)
    talk.send("break")
    with pytest.raises(TalkBroken, match="ended with 1: it is broken"):
        next(messages)


def test_closing_ends_a_program_that_waits_for_more():
    sshd = Sshd()
    head = RemoteHead("te1", lambda: Door(sshd), lambda *_: "")
    with closing(head):
        with head.talk(COMMAND) as opened:
            next(opened.messages())
        assert sshd.programs[0].wait(5) == 0


def test_a_lost_connection_ends_the_program_and_is_said():
    sshd, doors = Sshd(), []

    def connect() -> Door:
        doors.append(Door(sshd))
        return doors[-1]

    head = RemoteHead("te1", connect, lambda *_: "")
    with closing(head), head.talk(COMMAND) as opened:
        messages = opened.messages()
        next(messages)
        doors[0].close()
        with pytest.raises(TalkBroken):
            next(messages)
    began = time.monotonic()
    sshd.programs[0].wait(5)
    assert time.monotonic() - began < 5


def test_a_user_who_is_not_root_runs_it_by_sudo():
    sshd = Sshd()
    door = Door(sshd)
    door.user = "ubuntu"
    commands: list[str] = []
    sshd.check_channel_exec_request = lambda channel, command: commands.append(command.decode()) or True
    head = RemoteHead("te1", lambda: door, lambda *_: "")
    with closing(head), head.talk("exec true"):
        assert commands == ["sudo -n sh -c 'exec true'"]
