"""A real ssh server in this process: one key is let in, commands run in a shell here, ports are forwarded, and it
can fall silent."""

import socket
import subprocess
import threading
from contextlib import suppress

import paramiko


class _Door(paramiko.ServerInterface):
    def __init__(self, server):
        self.server = server
        self.targets = {}

    def get_allowed_auths(self, username):
        return "publickey"

    def check_auth_publickey(self, username, key):
        right = key.get_base64() == self.server.allowed
        return paramiko.AUTH_SUCCESSFUL if right else paramiko.AUTH_FAILED

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        if self.server.silent:
            threading.Event().wait()
        threading.Thread(target=self._serve, args=(channel, command), daemon=True).start()
        return True

    def _serve(self, channel, command):
        pipe = subprocess.PIPE
        with subprocess.Popen(command, shell=True, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
            in_background(lambda: pump(channel.recv, process.stdin.write, process.stdin.close))
            errors = in_background(lambda: pump(process.stderr.read, channel.sendall_stderr))
            pump(process.stdout.read, channel.sendall)
            errors.join()
            with suppress(OSError, EOFError):  # the client has gone
                channel.send_exit_status(process.wait())
        channel.close()

    def check_channel_direct_tcpip_request(self, chanid, origin, destination):
        self.server.forwarded.append(destination)
        self.targets[chanid] = destination
        return paramiko.OPEN_SUCCEEDED

    def forward(self, transport):
        """Thread: join each channel that asks for a port here with a connection to it."""
        while transport.is_active():
            channel = transport.accept(1)
            if channel is not None and (target := self.targets.pop(channel.chanid, None)):
                there = socket.create_connection(target)
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
    """Listens on a free port of 127.0.0.1 until closed."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.silent = False
        self.forwarded = []
        self.host_key = paramiko.ECDSAKey.generate()
        self.transports = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

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
            door = _Door(self)
            transport.start_server(event=threading.Event(), server=door)
            in_background(lambda d=door, t=transport: d.forward(t))

    def close(self):
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self.transports:
            transport.close()
