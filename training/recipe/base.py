"""A base model as a recipe names it: OWNER/NAME of the Hub, `folder:` with a path of the user's machine, or `built-in:`
with the name of what spotune makes itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path


class BaseKind(Enum):
    """Where a base model is from, by how its name begins in a recipe."""

    HUB = ""
    FOLDER = "folder:"
    BUILT_IN = "built-in:"


@dataclass(frozen=True)
class Base:
    """A base model, told from all others."""

    kind: BaseKind
    name: str
    """OWNER/NAME, the path of the folder, or what spotune calls it."""

    @classmethod
    def parse(cls, text: str) -> Base:
        """What `base_model` of a recipe says; `str` gives the text back."""
        kind = next(kind for kind in reversed(BaseKind) if text.startswith(kind.value))  # HUB, which is "", last
        return cls(kind, text.removeprefix(kind.value))

    def __str__(self) -> str:
        return f"{self.kind.value}{self.name}"

    @property
    def on_hub(self) -> bool:
        """Whether a hub has it, so that others can fetch it."""
        return self.kind is BaseKind.HUB

    @property
    def folder(self) -> Path | None:
        """On the machine that named it; None for what is no folder of the user's."""
        return Path(self.name) if self.kind is BaseKind.FOLDER else None

    @property
    def own_name(self) -> str:
        """What a recipe for it is called."""
        return own_name(self.name)

    @property
    def place(self) -> str:
        """Its folder below `models` on the nodes; that of a folder is told from others of its name."""
        told_apart = f"-{sha256(str(self).encode()).hexdigest()[:8]}" if self.kind is BaseKind.FOLDER else ""
        return f"{self.own_name}{told_apart}"


TINY = Base(BaseKind.BUILT_IN, "tiny")


def own_name(repo: str) -> str:
    """What a model is called after its id, as a recipe and a folder may be."""
    return re.sub(r"[^a-z0-9._-]+", "-", repo.rpartition("/")[2].lower()).strip("-._") or "model"
