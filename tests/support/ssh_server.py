"""A real ssh server in this process: one key is let in, commands run in a shell here, a shell has a terminal of the
client's size, ports are forwarded, files come and go over sftp, and it can fall silent or be cut off."""

import os
import pty
import signal
import socket
import subprocess
import termios
import threading
from contextlib import suppress

import paramiko

from inventory.nodes import Node
from tests.support.sftp_files import Files, Sftp


class _Door(paramiko.ServerInterface):
    def __init__(self, server):
        self.server = server
        self.targets = {}
        self.terminals = {}
        """By channel: our end of its terminal, and the shell's."""

    def get_allowed_auths(self, username):
        return "publickey"

    def check_auth_publickey(self, username, key):
        right = key.get_base64() == self.server.allowed
        return paramiko.AUTH_SUCCESSFUL if right else paramiko.AUTH_FAILED

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED if self.server.sessions else paramiko.OPEN_FAILED_CONNECT_FAILED

    def check_channel_subsystem_request(self, channel, name):
        self._answer()
        channel.sendall(self.server.sftp_greeting)
        if self.server.files.ends:
            channel.close()
        if self.server.files.absent or self.server.files.ends:
            return self.server.files.ends
        return super().check_channel_subsystem_request(channel, name)

    def check_channel_exec_request(self, channel, command):
        self._answer()
        self.server.commands.append(command.decode())
        serving = threading.Timer(0.02, self._serve, (channel, command))  # a channel that is closed before the
        serving.daemon = True  # client has read that its command was taken is an error there
        serving.start()
        return True

    def _answer(self):
        if self.server.silent:
            self.server.files.back.wait()

    def _serve(self, channel, command):
        pipe = subprocess.PIPE
        line = f"{self.server.bashrc}\n{command.decode()}"
        with subprocess.Popen(
            line, shell=True, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        ) as process:
            self.server.programs.append(process)
            in_background(lambda: pump(channel.recv, process.stdin.write, process.stdin.close))
            errors = in_background(lambda: pump(process.stderr.read, channel.sendall_stderr))
            pump(process.stdout.read, channel.sendall)
            process.stdout.close()  # where the client has gone the program learns it by writing on
            errors.join()
            process.stderr.close()
            with suppress(OSError, EOFError):  # the client has gone
                channel.send_exit_status(process.wait() & 0xFF)  # a program that a signal ended has a negative one
                channel.close()

    def check_channel_pty_request(self, channel, term, width, height, *_):
        self.terminals[channel.chanid] = pty.openpty()
        return self.check_channel_window_change_request(channel, width, height)

    def check_channel_window_change_request(self, channel, width, height, *_):
        ours, _ = self.terminals[channel.chanid]
        termios.tcsetwinsize(ours, (height, width))
        return True

    def check_channel_shell_request(self, channel):
        if channel.chanid not in self.terminals:
            return False
        in_background(lambda: self._serve_terminal(channel, *self.terminals[channel.chanid]))
        return True

    def _serve_terminal(self, channel, ours, its):
        argv = ["setsid", "--ctty", "--wait", "sh"]
        with subprocess.Popen(
            argv, stdin=its, stdout=its, stderr=its, env={**os.environ, "PS1": "$ "}, start_new_session=True
        ) as process:
            self.server.programs.append(process)
            os.close(its)
            in_background(lambda: pump(channel.recv, lambda data: os.write(ours, data)))
            pump(lambda size: os.read(ours, size), channel.sendall)  # fails when the shell has gone
            with suppress(OSError, EOFError):  # the client has gone
                channel.send_exit_status(process.wait())
                channel.close()

    def check_channel_direct_tcpip_request(self, chanid, origin, destination):
        if not self.server.forwards:
            return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        try:
            self.targets[chanid] = socket.create_connection(destination)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        self.server.forwarded.append(destination)
        return paramiko.OPEN_SUCCEEDED

    def forward(self, transport):
        """Thread: join each channel that asks for a port here with a connection to it."""
        kept = []  # one that nobody holds is closed, even before its request has come
        while transport.is_active():
            if (channel := transport.accept(1)) is None:
                continue
            kept.append(channel)
            if there := self.targets.pop(channel.chanid, None):
                in_background(lambda c=channel, t=there: pump(c.recv, t.sendall, lambda: t.shutdown(socket.SHUT_WR)))
                in_background(lambda c=channel, t=there: pump(t.recv, c.sendall, c.close))


def in_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def pump(read, write, at_end=lambda: None):
    """Carry bytes until one side ends."""
    with suppress(OSError, EOFError, ValueError):
        while data := read(1 << 15):
            write(data)
    with suppress(OSError, EOFError):
        at_end()


class SshServer:
    """Listens on a free port of 127.0.0.1 until closed; lets in whoever has the private key of `allowed` (base64)."""

    def __init__(self, allowed=""):
        self.allowed = allowed
        self.sessions = self.forwards = True
        """Whether it opens sessions (MaxSessions) and forwards ports (AllowTcpForwarding)."""
        self.silent = False
        """No command and no sftp is answered from now on."""
        self.bashrc = ""
        """What the user's shell does first."""
        self.sftp_greeting = b""
        """What it says before the sftp server does: Debian's is started by the shell, an internal one is not."""
        self.files = Files()
        self.commands, self.programs = [], []
        self.forwarded = []
        self.host_key = paramiko.ECDSAKey.generate()
        self.transports = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def node(self, folder):
        """The node that it plays, te1: with a key that it lets in and its host key, both in the folder."""
        self.allowed = key_pair(folder / "id")
        (folder / "known_hosts").write_text(self.known_hosts_line)
        return Node("te1", 0, "127.0.0.1", "127.0.0.1", "root", self.port, folder / "id", folder / "known_hosts", 0)

    @property
    def known_hosts_line(self):
        return f"[127.0.0.1]:{self.port} {self.host_key.get_name()} {self.host_key.get_base64()}\n"

    @property
    def open_connections(self):
        return sum(transport.is_active() for transport in self.transports)

    def _accept(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(peer)
            self.transports.append(transport)
            transport.add_server_key(self.host_key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Sftp)
            door = _Door(self)
            transport.start_server(event=threading.Event(), server=door)
            in_background(lambda d=door, t=transport: d.forward(t))

    def cut(self):
        """Every connection that is open breaks."""
        for transport in self.transports:
            transport.close()

    def close(self):
        self.files.back.set()
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for program in self.programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)


def key_pair(path, passphrase=""):
    """A private key file made by ssh-keygen; the public part's base64."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path], check=True)
    return path.with_suffix(".pub").read_text().split()[1]
