"""A known_hosts file line by line: paramiko gives the whole file up for one line that it cannot read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paramiko import HostKeys
from paramiko.hostkeys import HostKeyEntry

_HASHED = re.compile(r"\|1(\|[A-Za-z0-9+/]{27}=){2}")


@dataclass(frozen=True)
class KnownHosts:
    """What hosts can be verified by; a key that the file revokes is not among it."""

    entries: Sequence[HostKeyEntry]
    unread: Sequence[str]
    """The numbers of the other lines, each with what it is."""

    def keys_of(self, host: str) -> HostKeys:
        """Those of one host. Of several of a kind the first one counts, as where paramiko reads the file itself."""
        keys = HostKeys()
        for entry in reversed(self.entries):
            if any(is_name_of(host, name) for name in entry.hostnames):
                keys.add(host, entry.key.get_name(), entry.key)
        return keys

    @property
    def text(self) -> str:
        """A known_hosts file that paramiko reads as a whole."""
        return "".join(entry.to_line() or "" for entry in self.entries)

    @property
    def note(self) -> str:
        """The lines that could not be read, for people; empty where there is none."""
        return f"passed over, as it cannot be read: {', '.join(self.unread)}" if self.unread else ""


def known_host_name(address: str, port: int) -> str:
    """How known_hosts names a machine."""
    return address if port == 22 else f"[{address}]:{port}"


def revoked_in(text: str) -> frozenset[str]:
    """The keys that @revoked lines name, in base64."""
    lines = (line.split() for line in text.splitlines())
    return frozenset(words[3] for words in lines if words[:1] == ["@revoked"] and len(words) > 3)


def read_known_hosts(file: Path) -> KnownHosts:
    """A file's lines, whatever program wrote it; none where there is no such file. Raises OSError."""
    return parse_known_hosts(file.read_text(encoding="utf-8-sig", errors="replace") if file.exists() else "")


def parse_known_hosts(text: str) -> KnownHosts:
    """The lines that paramiko can verify a host by."""
    revoked = revoked_in(text)
    entries, unread = list[HostKeyEntry](), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(("#", "@revoked")) or revoked.intersection(words[2:3]):
            continue
        if words[0].startswith("@"):
            unread.append(f"line {number} ({words[0]})")
        elif entry := _entry(" ".join(words[:3])):
            entries.append(entry)
        else:
            unread.append(f"line {number}")
    return KnownHosts(entries, unread)


def _entry(line: str) -> HostKeyEntry | None:
    try:
        entry = HostKeyEntry.from_line(line)
    except Exception:  # of base64, of the kind of key, of what the key holds: paramiko lets each through as it is
        return None
    damaged = entry and any(name.startswith("|") and not _HASHED.fullmatch(name) for name in entry.hostnames)
    return None if damaged else entry


def is_name_of(host: str, name: str) -> bool:
    """Whether a name in the file, hashed maybe, stands for a host."""
    return name == (HostKeys.hash_host(host, name) if _HASHED.fullmatch(name) else host)
