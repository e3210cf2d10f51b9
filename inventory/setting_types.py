"""What the tables of cluster.toml are made of: base class, kinds of text with rules, what is said of a mistake."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from inventory.errors import USER_MISTAKE, InventoryError
from training.text.problems import called, expected, near


class SettingsError(InventoryError, ValueError):
    """cluster.toml cannot be used; the message says every reason, one a line, each with its key."""

    exit_code = USER_MISTAKE


class NoCluster(SettingsError):
    """There is no cluster.toml, no machine in it, or none is rented."""


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
    is_here = host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    schemes = ("https", "http") if is_here else ("https",)
    if value and (not host or parts.scheme not in schemes or re.search(r"[\s\\]", value)):
        raise ValueError("https://HOST... is expected (http:// on 127.0.0.1 only)")
    return value


def expanded(value: Path) -> Path:
    try:
        return value.expanduser()
    except RuntimeError:
        raise ValueError("there is no such user") from None


CLUSTER_NAME = "[a-z][a-z0-9]{0,7}"


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
        r"(?!(localhost[46]?|broadcasthost|ip6-.*)$)[a-z]([a-z0-9-]{0,30}[a-z0-9])?",
        "up to 32 small letters, digits and hyphens are expected, a letter first and no hyphen last, and no name that "
        "/etc/hosts has of its own (localhost, ip6-..., broadcasthost)",
    ),
]
IpAddress = Annotated[str, AfterValidator(address_text)]
Mirror = Annotated[str, AfterValidator(mirror_address)]
AptMirror = Annotated[
    str,
    spelled(r"(https?://[^\s/\\][^\s\\]*)?", "http://HOST... or https://HOST... is expected"),
    AfterValidator(lambda url: re.sub("(/+(debian|ubuntu)(-security|-ports)?)?/*$", "", url)),
]
"""By http too: its packages are signed. Without the archive's folder, which help pages of mirrors name too."""
UserPath = Annotated[Path, Field(strict=False), AfterValidator(expanded)]
UserName = Annotated[
    str,
    spelled(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "letters, digits and _ . @ + - are expected, a letter, digit or _ first"),
]
"""It becomes an argument of ssh: nothing that could be read as an option."""
Reachable = Annotated[
    str,
    spelled(
        r"[A-Za-z0-9][A-Za-z0-9_.-]*|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f.:]*(%[A-Za-z0-9_.-]+)?",
        "a host name or an IP address alone is expected; a user or a port goes into this node's keys user and port",
    ),
]
"""A host name or an address, as an argument of ssh."""
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """Base of every table: unknown keys and other types are errors, values never change once read.

    TOML has no paths and no tuples; only those fields are read from its strings and lists (`strict=False`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


UNKNOWN = "extra_forbidden"
WORDS = {
    UNKNOWN: "unknown key",
    "missing": "missing",
    "model_type": "must be a table",
    "tuple_type": "must be a list",
}


FULL_WIDTH = dict(zip("“”„‘’，：＝［］＃【】", '"""\'\',:=[]#[]', strict=True))
"""What an input method writes for signs of TOML."""
QUOTED = re.compile(r""" "(\\.|[^"])*" | '[^']*' | \#.* """, re.VERBOSE)
"""Of a line, in which these signs may be."""


def of_another_width(text: str) -> str:
    """Where a file has signs that only look like TOML's; empty where it has none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if sign := next((sign for sign in QUOTED.sub("", line) if sign in FULL_WIDTH), ""):
            return f"; line {number} has the sign {sign}, which is none of TOML's: write {FULL_WIDTH[sign]}"
    return ""


def of_quotes(text: str) -> str:
    """Which line has a quote that nothing closes, or a path of Windows in double quotes; empty where none has."""
    if '"""' in text or "'''" in text:
        return ""
    for number, line in enumerate(text.splitlines(), start=1):
        if _is_toml(line):
            continue
        if '"' in line and "\\" in line:
            return (
                f"; in line {number} the sign \\ is between double quotes, where it begins an escape: write single ones"
            )
        if any(line.count(quote) % 2 for quote in "\"'"):
            return f"; in line {number} a quote is opened and not closed"
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True


def sentences(error: ValidationError, content: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    """Every problem of a file with its key, as in nodes.te1.address. `known`: all keys there are, dotted."""
    for problem in error.errors():
        key = _key(problem["loc"], content)
        if problem["type"] == UNKNOWN:
            yield f"{key}: {WORDS[UNKNOWN]}{_meant(problem['loc'], known)}"
        elif problem["type"] in WORDS:
            yield f"{key}: {WORDS[problem['type']]}"
        else:
            yield f"{key}: {expected(problem)}, not {problem['input']!r}"


def _key(place: Sequence[int | str], content: Mapping[str, Any]) -> str:
    """As in nodes.te1.address: a node by its name, where it has one."""
    nodes: Any = content.get("nodes")
    node = nodes[int(place[1])] if place[0] == "nodes" and isinstance(nodes, list) and len(place) > 1 else None
    name = node.get("name") if isinstance(node, dict) else None
    return ".".join(map(str, ("nodes", name, *place[2:]) if name else place))


def _meant(place: Sequence[int | str], known: Sequence[str]) -> str:
    name = ".".join(part for part in place if isinstance(part, str))
    table, _, leaf = name.rpartition(".")
    keys = [key for key in known if not any(each.startswith(f"{key}.") for each in known)]
    if not (meant := called(leaf, keys) or near(name, known)):
        return ""
    its_table = meant.rpartition(".")[0]
    where, here = (f"below [{name}]" if name else "above all tables" for name in (its_table, table))
    return f"; did you mean {meant}?" + (f" It belongs {where}, this line stands {here}" if where != here else "")
