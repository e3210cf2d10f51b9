"""recipes/models.lock: the commit and the files that a model's revision stood for when it was first fetched.

A recipe's `main` is moved by whoever owns the repository; from its first use on it means one commit here, whose files
have one manifest, whichever hub or mirror sends them. Written by the base deploy and by `fab train`, to be committed
with the recipes. To take a newer one: delete its table, and deploy.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.models.names import RECIPES
from training.recipe.base import Base
from training.recipe.recipe import RecipeError
from training.run.folder import write_atomically

LOCK = RECIPES / "models.lock"
HEAD = """\
# Which commit each model's revision stands for: written when a model is first fetched, to be committed.
# `files` is the sha256 of its manifest, the SHA256SUMS beside the model. docs/training.md says how to take a newer one.
"""
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Pin:
    """What a revision stands for."""

    commit: str
    files: str
    """sha256 of the model's SHA256SUMS; empty: not known."""


Pins = Mapping[tuple[str, str], Pin]
"""By repository and revision."""


def read_pins(lock: Path | None = None) -> Pins:
    """What is pinned; RecipeError for a lock that cannot be read, which must not pass for an empty one."""
    lock = lock or LOCK
    try:
        tables = tomllib.loads(lock.read_text(encoding="utf-8"))
        return {
            (repo, revision): _pin(entry) for repo, revisions in tables.items() for revision, entry in revisions.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise RecipeError(f"{lock} cannot be read: {error}") from None


def _pin(entry: Mapping[str, Any]) -> Pin:
    commit, files = entry["commit"], entry.get("files", "")
    if not COMMIT.fullmatch(commit) or not re.fullmatch(r"([0-9a-f]{64})?", files):
        raise ValueError(f"commit {commit!r} and files {files!r} are no digests")
    return Pin(commit, files)


def pinned(pins: Pins, base: Base, revision: str) -> Pin:
    """What a recipe's revision stands for: pinned here, or a commit by itself; an empty Pin where it is not known."""
    return pins.get((str(base), revision)) or Pin(revision if COMMIT.fullmatch(revision) else "", "")


def disagreement(pins: Pins, recorded: Mapping[str, Any], base: Base, revision: str) -> str | None:
    """How a fetched model (its spotune-model.json) is another than what is wanted; None where it is that one."""
    if not base.on_hub:
        return None
    repo = base.name
    pin, what = pinned(pins, base, revision), f"{repo} at {revision}"
    fetched = {"repo": repo, "revision": revision, "commit": pin.commit} | dict(recorded)
    if fetched["repo"] != repo:
        return f"the model that lies there is {fetched['repo']}, not {repo}"
    if pin.commit and fetched["commit"] != pin.commit:
        return f"{what} is commit {str(fetched['commit'])[:12]} there and {pin.commit[:12]} in {LOCK.name}"
    if not pin.commit and fetched["revision"] != revision:
        return f"{repo} lies there at {fetched['revision']}, not at {revision}"
    if pin.files and recorded["hash"] != pin.files:
        return f"{what}, commit {pin.commit[:12]}, has other files there than those first fetched ({LOCK.name})"
    return None


def remember(recorded: Mapping[str, Any], base: Base, revision: str, lock: Path | None = None) -> bool:
    """Write what was fetched into the lock, where that says nothing of it yet; whether it was written."""
    lock, pins = lock or LOCK, read_pins(lock)
    repo, commit = base.name, str(recorded.get("commit", ""))
    new = base.on_hub and (repo, revision) not in pins
    if not new or not COMMIT.fullmatch(commit) or recorded.get("repo") != repo:
        return False
    try:
        pin = _pin({"commit": commit, "files": recorded["hash"]})
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{repo}: what the head says of it is not written to {lock.name}: {error}") from None
    text = HEAD
    for (other, its_revision), each in sorted({**pins, (repo, revision): pin}.items()):
        text += f"\n[{json.dumps(other)}.{json.dumps(its_revision)}]\ncommit = {json.dumps(each.commit)}\n"
        text += f"files = {json.dumps(each.files)}\n"
    write_atomically(lock, text)
    return True
