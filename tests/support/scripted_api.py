"""A real HTTP server on loopback that answers the SDK from a script: what a cloud does on a bad day."""

import json
import socket
import struct
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from inventory.localcloud.ecs import api
from inventory.localcloud.ecs.actions import ApiError
from tests.support.waiting import until


class Say:
    """One answer: a status, a body (dict or bytes), headers; `cut`: no answer at all; `late`: one that comes once
    something else was asked."""

    def __init__(self, status=200, body=None, headers=None, cut=False, late=False):
        self.status, self.headers, self.cut, self.late = status, headers or {}, cut, late
        body = {"RequestId": "R-1"} if body is None else body
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def refusal(status, code, message="No.", **headers):
    body = {"RequestId": "R-9", "HostId": "ecs.example", "Code": code, "Message": message}
    return Say(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def undescribed(version, action, fields):
    """The refusal of a call that the vendor does not describe; None of any other."""
    try:
        api.check(version, action, fields)
    except ApiError as error:
        return refusal(error.status, error.code, error.message)
    return None


class ScriptedApi:
    """Answers in the order given, the last one again and again; `calls` has what was asked, `raw` how."""

    def __init__(self, *answers):
        self.answers = list(answers) or [Say()]
        self.calls, self.raw = [], []

    def __enter__(self):
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                query = urllib.parse.urlsplit(self.path).query
                fields = dict(urllib.parse.parse_qsl(query, True)) | dict(urllib.parse.parse_qsl(body, True))
                api.calls.append((self.headers["x-acs-action"], fields))
                number = len(api.calls)
                api.raw.append((self.path, body, dict(self.headers)))
                say = undescribed(self.headers["x-acs-version"], self.headers["x-acs-action"], fields)
                say = say or (api.answers.pop(0) if len(api.answers) > 1 else api.answers[0])
                if say.late:
                    until(lambda: len(api.calls) > number, "the next call")
                if say.cut:
                    linger = struct.pack("ii", 1, 0)  # close by RST, so that the client sees it at once
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()
                    return
                self.send_response(say.status)
                for name, value in {"content-type": "application/json", **say.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(say.body)))
                self.end_headers()
                self.wfile.write(say.body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.server.server_port}"
