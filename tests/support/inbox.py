"""A webhook on this machine, which keeps what it is sent."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "s3cretTOKEN"


class Inbox(ThreadingHTTPServer):
    """Takes what is posted to it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Post)
        self.received = []
        self.status, self.answer = 200, b"{}"
        self.answers = threading.Event()
        self.answers.set()

    @property
    def place(self):
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self):
        return f"json://{self.place}/{TOKEN}"


class Post(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body.decode("utf-8")))
        self.server.answers.wait(20)
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *arguments):
        pass


@contextmanager
def open_inbox():
    with Inbox() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()
