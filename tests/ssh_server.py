"""A real ssh server in this process: one key is let in, commands run in a shell here, and it can fall silent."""

import socket
import subprocess
import threading
from contextlib import suppress

import paramiko


class _Door(paramiko.ServerInterface):
    def __init__(self, server):
        self.server = server

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
        done = subprocess.run(command, shell=True, capture_output=True, stdin=subprocess.DEVNULL)
        channel.sendall(done.stdout)
        channel.sendall_stderr(done.stderr)
        channel.send_exit_status(done.returncode)
        channel.close()


class SshServer:
    """Listens on a free port of 127.0.0.1 until closed."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.silent = False
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
            transport.start_server(event=threading.Event(), server=_Door(self))

    def close(self):
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self.transports:
            transport.close()
