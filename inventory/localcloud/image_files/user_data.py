"""What cloud-init does of a machine's user data, in little: scripts, and cloud-config's keys, files, commands, name.

Runs in a host at boot with its own Python. Everything comes from the metadata service, as on the real cloud; a host
without one has no file beside this program that names it, and this program is not run. Once in an instance's life.
"""

from __future__ import annotations

import base64
import email
import gzip
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATE = Path("/var/lib/cloud/instance")
LOG = Path("/var/log/cloud-init-output.log")
AUTHORIZED_KEYS = Path("/root/.ssh/authorized_keys")
TOKEN_HEADER = "X-aliyun-ecs-metadata-token"
WAIT_S = 60


class Metadata:
    """The metadata service, asked with a session token."""

    def __init__(self, address: str) -> None:
        self.base = f"http://{address}/latest"
        # No proxy of anybody's stands between a machine and its metadata.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        lifetime = {f"{TOKEN_HEADER}-ttl-seconds": "600"}
        request = urllib.request.Request(f"{self.base}/api/token", method="PUT", headers=lifetime)
        self.token = self._open(request).decode()

    def get(self, path: str) -> bytes | None:
        """None where there is no such thing."""
        request = urllib.request.Request(f"{self.base}/{path}", headers={TOKEN_HEADER: self.token})
        try:
            return self._open(request)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _open(self, request: urllib.request.Request) -> bytes:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with self.opener.open(request, timeout=5) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError:
                raise
            except OSError:  # the network is not up yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def parts(data: bytes) -> Iterator[bytes]:
    """The parts of user data: of a MIME archive each attachment, else the whole. Pure."""
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if not data[:200].lower().startswith((b"content-type: multipart/", b"mime-version:")):
        yield data
        return
    for part in email.message_from_bytes(data).walk():
        if not part.is_multipart():
            content = part.get_payload(decode=True)
            yield content if isinstance(content, bytes) else b""


def authorize(keys: list[str]) -> None:
    """Let these keys in, beside those that are."""
    AUTHORIZED_KEYS.parent.mkdir(mode=0o700, exist_ok=True)
    known = AUTHORIZED_KEYS.read_text().splitlines() if AUTHORIZED_KEYS.exists() else []
    new = [key.strip() for key in keys if key.strip() and key.strip() not in known]
    AUTHORIZED_KEYS.write_text("".join(f"{line}\n" for line in [*known, *new]))
    AUTHORIZED_KEYS.chmod(0o600)


def write_file(wanted: dict[str, Any]) -> None:
    """An entry of write_files."""
    content = wanted.get("content", "")
    raw = content.encode() if isinstance(content, str) else content
    encoding = wanted.get("encoding", "")
    if encoding in ("b64", "base64", "gz+b64", "gz+base64", "gzip+base64"):
        raw = base64.b64decode(raw)
    if encoding.startswith(("gz", "gzip")):
        raw = gzip.decompress(raw)
    path = Path(wanted["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made with its mode: what is secret is never open to all, not even for a moment.
    mode = int(str(wanted.get("permissions", "0644")), 8)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if wanted.get("append") else os.O_TRUNC)
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(raw)
    user, _, group = wanted.get("owner", "root:root").partition(":")
    shutil.chown(path, user, group or user)


def apply(config: dict[str, Any]) -> list[str | list[str]]:
    """Do what a cloud-config says but its commands, which are given back."""
    if config.get("hostname"):
        subprocess.run(["hostnamectl", "set-hostname", str(config["hostname"])], check=True)
    for each in config.get("write_files") or []:
        write_file(each)
    authorize(config.get("ssh_authorized_keys") or [])
    return list(config.get("runcmd") or [])


def run(command: str | list[str], log: Any) -> bool:
    """Run a command with its output in the log; whether it succeeded."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode == 0
    except OSError as error:
        log.write(f"{argv[0]}: {error}\n".encode())
        return False


def act(data: bytes, log: Any) -> bool:
    """Do what one part of the user data says; whether all of it succeeded."""
    if data.startswith(b"#!"):
        script = STATE / "scripts" / f"part-{time.monotonic_ns()}"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_bytes(data)
        script.chmod(0o700)
        return run([str(script)], log)
    if data.startswith(b"#cloud-config"):
        import yaml  # type: ignore[import-untyped]

        succeeded = [run(each, log) for each in apply(yaml.safe_load(data) or {})]
        return all(succeeded)
    log.write(b"user data that is neither a script (#!) nor #cloud-config is left alone\n")
    return True


def main() -> int:
    """Once an instance: let the key pair in, then act on the user data."""
    metadata = Metadata((HERE / "metadata").read_text().strip())
    instance_id = (metadata.get("meta-data/instance-id") or b"").decode()
    done = STATE.with_name("instance-id")
    if done.exists() and done.read_text().strip() == instance_id:
        return 0
    STATE.mkdir(parents=True, exist_ok=True)
    # First: what fails half-way is not begun again at the next boot, as with cloud-init.
    done.write_text(f"{instance_id}\n")
    authorize([(metadata.get("meta-data/public-keys/0/openssh-key") or b"").decode()])
    data = metadata.get("user-data")
    if not data:
        return 0
    kept = STATE / "user-data.txt"
    kept.touch(mode=0o600)
    kept.write_bytes(data)
    with LOG.open("ab", buffering=0) as log:
        try:
            succeeded = [act(part, log) for part in parts(data)]
            return 0 if all(succeeded) else 1
        except Exception as error:
            log.write(f"user data: {type(error).__name__}: {error}\n".encode())
            return 1


if __name__ == "__main__":
    sys.exit(main())
