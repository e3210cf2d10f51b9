"""What the tables of cluster.toml are made of: their base class, and kinds of text with their rules."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inventory.errors import USER_MISTAKE, InventoryError


class SettingsError(InventoryError, ValueError):
    """cluster.toml cannot be used; the message says every reason, one a line, each with its key."""

    exit_code = USER_MISTAKE


def address_text(value: str) -> str:
    if not is_address(value):
        raise ValueError("an IP address is expected, such as 192.0.2.7")
    return str(ipaddress.ip_address(value))


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def network_text(value: str) -> str:
    try:
        return str(ipaddress.IPv4Network(value))
    except ValueError:
        raise ValueError("a network by its first address and its length is expected, such as 10.213.77.0/24") from None


def mirror_address(value: str) -> str:
    """Packages and models come by https, so that nobody on the way changes them; by http from this machine alone."""
    parts = urlsplit(value)
    host = parts.hostname or ""
    if value and not (host and (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)))):
        raise ValueError("https://HOST... is expected (http:// on 127.0.0.1 only)")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def expanded(value: Path) -> Path:
    try:
        return value.expanduser()
    except RuntimeError:
        raise ValueError("there is no such user") from None


def spelled(pattern: str, words: str) -> AfterValidator:
    """A text that a pattern matches as a whole, which `words` say to people."""

    def checked(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(words)
        return value

    return AfterValidator(checked)


HostName = Annotated[
    str,
    spelled(
        r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?",
        "up to 32 small letters, digits and hyphens are expected, a letter first and no hyphen last",
    ),
]
IpAddress = Annotated[str, AfterValidator(address_text)]
Mirror = Annotated[str, AfterValidator(mirror_address)]
UserPath = Annotated[Path, Field(strict=False), AfterValidator(expanded)]
UserName = Annotated[
    str,
    spelled(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "letters, digits and _ . @ + - are expected, a letter, digit or _ first"),
]
"""It becomes an argument of ssh: nothing that could be read as an option."""
Reachable = Annotated[str, spelled(r"[A-Za-z0-9:][A-Za-z0-9.:_%-]*", "a host name or an IP address is expected")]
"""A host name or an address, as an argument of ssh."""
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """Base of every table: unknown keys and other types are errors, values never change once read.

    TOML has no paths and no tuples; only those fields are read from its strings and lists (`strict=False`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
