"""What clients of a served cloud find in its folder: the access key, where it listens, and the socket by which who may
enter the folder drives the cloud without a key."""

from __future__ import annotations

import configparser
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CREDENTIALS, ADDRESS, CONTROL = "credentials.ini", "api.json", "control.sock"


def key_of(folder: Path) -> tuple[str, str]:
    """Access key id and secret of the cloud in this folder, made on the first call.

    The file is in the form of the vendor's SDK: its ProfileCredentialsProvider reads it.
    """
    path = folder / CREDENTIALS
    ini = configparser.ConfigParser(interpolation=None)
    if not ini.read(path, encoding="utf-8"):
        key_id, secret = f"LOCAL{secrets.token_hex(8)}", secrets.token_hex(15)
        ini["default"] = {"type": "access_key", "access_key_id": key_id, "access_key_secret": secret}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            ini.write(file)
    found = ini["default"]
    return found["access_key_id"], found["access_key_secret"]


@contextmanager
def control_socket(folder: Path) -> Iterator[str]:
    """The control socket's path, by a name that is short however deep the folder lies: the system takes 107 bytes."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/{CONTROL}"
    finally:
        os.close(descriptor)


def tell(folder: Path, port: int) -> None:
    """Write where the API listens and which process it is."""
    half = folder / f"{ADDRESS}.half"
    half.write_text(json.dumps({"endpoint": f"127.0.0.1:{port}", "pid": os.getpid()}), encoding="utf-8")
    half.replace(folder / ADDRESS)
