"""The lock of the nodes' Python packages, read for one torch flavour. Pure.

requirements.lock is made by uv for CUDA machines: every line with its hashes. The CPU wheel of torch is
another file than the one the lock names, and hash checking is all or nothing within one install; so a CPU
node installs in two steps: all the rest hashed, then torch by its version and the hash in PyTorch's own index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

CUDA_ONLY = re.compile(r"^(nvidia|cuda)-|^triton$|^liger-kernel$")
_NAME = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^ ;\\]+)")


def requirements(lock_text: str) -> Iterator[tuple[str, str]]:
    """(name, requirement with its hashes) of each pinned package; comments left out."""
    entry: list[str] = []
    for line in [*lock_text.splitlines(), ""]:
        if line.lstrip().startswith("#"):
            continue
        if entry and not line.startswith(" "):
            yield _name(entry[0]), "\n".join(entry)
            entry = []
        if line.strip():
            entry.append(line)


def hashed_requirements(lock_text: str, flavour: str) -> str:
    """What one hash-checked install gets: the whole lock, or on "cpu" all but torch and CUDA."""
    return _lines(text for name, text in requirements(lock_text) if flavour == "cuda" or _on_cpu(name))


def cpu_requirements(lock_text: str) -> str:
    """Every package of a CPU node, torch by its version alone: what a wheelhouse for such nodes holds."""
    return _lines([*(_without_hashes(t) for n, t in requirements(lock_text) if _on_cpu(n)), torch_pin(lock_text)])


def one_requirement(lock_text: str, name: str) -> str:
    """A single package with its hashes; KeyError when the lock has none."""
    return dict(requirements(lock_text))[name] + "\n"


def torch_pin(lock_text: str) -> str:
    """`torch==VERSION`, without hashes."""
    return _without_hashes(one_requirement(lock_text, "torch"))


def lock_hash(text: str) -> str:
    """sha256 of what the lock pins: its comments and blank lines do not count."""
    pins = "\n".join(sorted(entry for _, entry in requirements(text)))
    return hashlib.sha256(pins.encode()).hexdigest()


def _lines(entries: Iterator[str] | list[str]) -> str:
    return "".join(f"{entry}\n" for entry in entries)


def _without_hashes(entry: str) -> str:
    return entry.splitlines()[0].removesuffix("\\").rstrip()


def _on_cpu(name: str) -> bool:
    return name != "torch" and not CUDA_ONLY.match(name)


def _name(line: str) -> str:
    match = _NAME.match(line)
    if match is None:
        raise ValueError(f"not a pinned requirement: {line!r}")
    return match.group(1).lower()
