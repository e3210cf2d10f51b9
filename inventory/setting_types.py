"""What the tables of cluster.toml are made of: their base class, and kinds of text with their rules."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inventory.errors import USER_MISTAKE, InventoryError


class SettingsError(InventoryError, ValueError):
    """cluster.toml cannot be used; the message says every reason, one a line, each with its key."""

    exit_code = USER_MISTAKE


def address_text(value: str) -> str:
    return str(ipaddress.ip_address(value))


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


HostName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
IpAddress = Annotated[str, AfterValidator(address_text)]
Mirror = Annotated[str, AfterValidator(mirror_address)]
UserPath = Annotated[Path, Field(strict=False), AfterValidator(expanded)]
UserName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]*$")]
"""It becomes an argument of ssh: nothing that could be read as an option."""
Reachable = Annotated[str, Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_%-]*$")]
"""A host name or an address, as an argument of ssh."""
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """Base of every table: unknown keys and other types are errors, values never change once read.

    TOML has no paths and no tuples; only those fields are read from its strings and lists (`strict=False`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
