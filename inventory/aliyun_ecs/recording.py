"""Scrubbed answers as files, so that a user with an account can give us samples: Action-001.json, ..."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from pathlib import Path
from typing import Any

from inventory.aliyun_ecs.scrub import Scrubber

VARIABLE = "SPOTUNE_ECS_RECORD"
"""Environment variable that names the folder to record into."""


class Recording:
    """A folder that every answer is written to, without what it tells about its owner."""

    def __init__(self, folder: Path, state: Path) -> None:
        """The salt lies in the state folder, away from the answers: those may be given away."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._scrubber = Scrubber(_salt(state / "recording.salt"))

    def keep(self, action: str, answer: Any) -> Path:
        """Write an answer under the next free number."""
        text = json.dumps(self._scrubber.answer(answer), indent=1, ensure_ascii=False)
        for number in itertools.count(1):
            path = self._folder / f"{action}-{number:03d}.json"
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text + "\n")
            except FileExistsError:
                continue
            return path
        raise AssertionError  # the count has no end


def _salt(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        salt = secrets.token_bytes(32)
        file.write(salt)
    return salt
