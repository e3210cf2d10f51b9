"""A model hub on loopback that speaks the Hub's HTTP API to the real `hf` client, for reading and for publishing.

It serves what it is given, refuses like the Hub does (unknown, gated), and fails on demand: a transfer cut
half-way, a file sent with wrong bytes. Large-file storage (LFS) holds every `.safetensors`, as on the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" * 6 + "cafe"


@dataclass
class Hub:
    """`with Hub({"acme/model": {"config.json": b"{}"}}) as hub:` serves at hub.url; data sets are
    named datasets/acme/name."""

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    """What opens a gated model."""
    gated_files: set[str] = field(default_factory=set)
    """Models of which anyone may see the list of files, and only the token opens a file: as the Hub gates."""
    head: str = COMMIT
    """The commit that `main` is."""
    gone: set[str] = field(default_factory=set)
    """Commits that there are no longer."""
    storage: str = ""
    """Address of another server that files are fetched from, by a redirect."""
    unavailable: set[str] = field(default_factory=set)
    """Files the server fails to send."""
    private: set[str] = field(default_factory=set)
    """Models that only the token opens."""
    stored_wrong: set[str] = field(default_factory=set)
    """Files of which another content is kept than the one sent."""
    cards: dict[str, dict[str, str]] = field(default_factory=dict)
    """What a model's page says first, such as its licence."""
    authorised: list[str] = field(default_factory=list)
    """(method, path) of each request that brought the token in its Authorization header."""
    leaked: list[str] = field(default_factory=list)
    """Where the token came along anywhere else: address, body, other header."""
    _large: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range header) of each request answered."""
    _cuts: dict[str, list[int]] = field(default_factory=dict)
    _wrong: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def cut(self, path: str, *after_bytes: int) -> None:
        """Break the next transfers of a file, each after so many bytes."""
        self._cuts[path] = list(after_bytes)

    def send_wrong_bytes(self, path: str, times: int = 1) -> None:
        """Send the file with one byte changed, the right size and the right announcement."""
        self._wrong[path] = times

    def downloads(self, path: str) -> list[str]:
        """The Range headers of the downloads of a file ("" where the whole was asked for)."""
        return [r for method, p, r in self.requests if method == "GET" and p.endswith(f"/{path}")]

    def body(self, model: str, path: str) -> bytes:
        """What is sent this time."""
        content = self.models[model][path]
        if self._wrong.get(path, 0) > 0:
            self._wrong[path] -= 1
            middle = len(content) // 2
            return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        return content

    def cut_now(self, path: str) -> int | None:
        """After how many bytes this transfer breaks, if it does."""
        return self._cuts[path].pop(0) if self._cuts.get(path) else None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        self._note_token(b"")
        for model in self.hub.models:
            name = model if model.startswith("datasets/") else f"models/{model}"
            if model in self.hub.private and not self._has_token() and path.startswith((f"/api/{name}", f"/{model}/")):
                return self._refuse(401, "RepoNotFound", "Repository not found")
            if path == f"/api/{name}":
                return self._allowed(model, "main", self._listing)
            for prefix, answer in (
                (f"/api/{name}/revision/", self._listing),
                (f"/api/{name}/tree/", self._tree),
                (f"/{model}/resolve/", self._file),
            ):
                if path.startswith(prefix):
                    return self._allowed(model, path.removeprefix(prefix), answer)
        self._refuse(404, "RepoNotFound", "Repository not found")

    def _allowed(self, model: str, rest: str, answer: Any) -> None:
        if model in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        revision = rest.partition("/")[0]
        if revision not in ("main", COMMIT, self.hub.head) or revision in self.hub.gone:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        answer(model, rest)

    def _listing(self, model: str, rest: str) -> None:
        siblings = [
            {"rfilename": path, "size": len(data), "blobId": _git_id(data), "lfs": _lfs(path, data, "sha256")}
            for path, data in self.hub.models[model].items()
        ]
        sha = self.hub.head if rest.partition("/")[0] == "main" else rest.partition("/")[0]
        facts = {"id": model, "modelId": model, "sha": sha, "private": model in self.hub.private}
        self._json({**facts, "siblings": siblings, "cardData": self.hub.cards.get(model, {})})

    def _tree(self, model: str, _: str) -> None:
        self._json(
            [
                {"type": "file", "path": path, "size": len(data), "oid": _git_id(data)}
                | ({"lfs": lfs} if (lfs := _lfs(path, data, "oid")) else {})
                for path, data in self.hub.models[model].items()
            ]
        )

    def _file(self, model: str, rest: str) -> None:
        revision, _, path = rest.partition("/")
        if model in self.hub.gated_files and not self._has_token():
            return self._refuse(401, "GatedRepo", "Access to this model is restricted")
        if path not in self.hub.models[model]:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if path in self.hub.unavailable and self.command == "GET":
            return self._refuse(503, "", "Service unavailable")
        right = self.hub.models[model][path]
        if self.hub.storage and self.command == "GET":
            return self._answer(302, b"", {"Location": f"{self.hub.storage}{self.path}"})
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        getting = self.command == "GET"
        body = (self.hub.body(model, path) if getting else right)[start:]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("X-Repo-Commit", self.hub.head if revision == "main" else revision)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{len(right) - 1}/{len(right)}")
        lfs = _lfs(path, right, "sha256")
        self.send_header("ETag", f'"{lfs["sha256"] if lfs else _git_id(right)}"')
        if lfs:
            self.send_header("X-Linked-Etag", f'"{lfs["sha256"]}"')
            self.send_header("X-Linked-Size", str(len(right)))
        self.end_headers()
        if not getting:
            return
        stop = self.hub.cut_now(path)
        self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._body()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if not self._has_token():
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        content = body.decode()
        if path == "/api/repos/create":
            return self._create(json.loads(content))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(content))
        for model in self.hub.models:
            if path == f"/api/models/{model}/preupload/main":
                return self._preupload(model, json.loads(content))
            if path == f"/api/models/{model}/commit/main":
                return self._commit(model, [json.loads(line) for line in content.splitlines()])
        self._refuse(404, "RepoNotFound", "Repository not found")

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return self._refuse(400, "", "another content than announced")
        self.hub._large[oid] = body
        self._answer(200, b"", {})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.hub.models:
            return self._answer(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode(), {})
        self.hub.models[name] = {".gitattributes": b""}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._json({"url": f"{self.hub.url}/{name}"})

    def _preupload(self, model: str, asked: dict[str, Any]) -> None:
        self._json(
            {
                "files": [
                    {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
                    for file in asked["files"]
                    for mode in ["lfs" if file["path"].endswith(".safetensors") else "regular"]
                ]
            }
        )

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.hub.url}/large/{item['oid']}"}}}
            for item in asked["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, model: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.hub._large[value["oid"]]
            else:
                continue
            self.hub.models[model][value["path"]] = content + b"!" * (value["path"] in self.hub.stored_wrong)
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{model}/commit/{COMMIT}"})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.hub.requests.append((self.command, urlsplit(self.path).path, ""))
        self._note_token(body)
        return body

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _note_token(self, body: bytes) -> None:
        if self._has_token():
            self.hub.authorised.append(f"{self.command} {self.path}")
        others = [value for name, value in self.headers.items() if name.lower() != "authorization"]
        if self.hub.token in " ".join([self.path, *others]) or self.hub.token.encode() in body:
            self.hub.leaked.append(f"{self.command} {self.path}")


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs(path: str, data: bytes, key: str) -> dict[str, Any] | None:
    if not path.endswith(".safetensors"):
        return None
    return {key: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
