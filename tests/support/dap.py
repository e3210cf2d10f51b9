"""A small debugger client: the Debug Adapter Protocol over a socket, as an editor speaks it."""

import json
import socket
import time


class Dap:
    """One connection to a debug adapter; messages are JSON after a Content-Length header."""

    def __init__(self, port, timeout_s=30):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.stream = self.socket.makefile("rb")
        self.count = 0
        self.events = []

    def send(self, command, **arguments):
        """Send a request; gives its number."""
        self.count += 1
        body = json.dumps({"seq": self.count, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.count

    def _receive(self):
        length = 0
        while (line := self.stream.readline().strip()) or not length:
            assert line or length, "the adapter has closed the connection"
            length = int(line.split(b":")[1])
        return json.loads(self.stream.read(length))

    def answer(self, number):
        """The body of the response to a request."""
        while True:
            message = self._receive()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                return message.get("body", {})
            self.events.append(message)

    def ask(self, command, **arguments):
        return self.answer(self.send(command, **arguments))

    def event(self, name, timeout_s=30):
        """The next event of that name."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self.events:
                if message["type"] == "event" and message["event"] == name:
                    self.events.remove(message)
                    return message.get("body", {})
            self.events.append(self._receive())
        raise TimeoutError(name)

    def attach(self, local_root, remote_root, breakpoints):
        """Attach with a path mapping and breakpoints ({file: [lines]}); gives the verified lines."""
        self.ask("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        mapping = {"localRoot": local_root, "remoteRoot": remote_root}
        attached = self.send("attach", pathMappings=[mapping], justMyCode=False)
        self.event("initialized")
        verified = []
        for file, lines in breakpoints.items():
            told = self.ask("setBreakpoints", source={"path": file}, breakpoints=[{"line": line} for line in lines])
            verified += [point["line"] for point in told["breakpoints"] if point["verified"]]
        self.ask("configurationDone")
        self.answer(attached)
        return verified

    def top_frame(self, thread):
        return self.ask("stackTrace", threadId=thread)["stackFrames"][0]

    def close(self):
        self.stream.close()
        self.socket.close()
