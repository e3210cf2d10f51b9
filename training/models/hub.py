"""The model hub as one that is not trusted: where it is asked, who may see the token, which names are followed.

On the head, where models and data sets are fetched, and on the laptop, which publishes. Imports nothing but the
standard library until the hub's own client is there.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from training.text import internet
from training.text.files import within

OWN_HOST = "huggingface.co"
TOKEN_HOST = "SPOTUNE_TOKEN_HOST"
"""Names, beside HF_TOKEN in the environment, the one other host that the token is meant for."""
NO_ENTRY = (401, 403)
"""How a hub asks for a token."""
ANSWER_S = 12.0
"""How long a hub has to say what it holds. Its client waits for ever by itself, and a limit given to it holds for each
address of a name."""

T = TypeVar("T")


class HubError(ValueError):
    """A hub that is not asked, or an answer that is not followed; the message says which and why."""


class SilentHubError(HubError):
    """A hub that does not answer; the message says which and why, and not what to do."""


@dataclass(frozen=True)
class Hub:
    """A hub's address, and the token that it may see where it asks for one."""

    address: str
    token: str | None = field(repr=False)
    withheld: bool = False
    """There is a token, and it is not for this hub."""

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or ""

    @property
    def another(self) -> str:
        """What a user does where it does not answer."""
        china = 'preset = "china" or ' if self.host == OWN_HOST else ""
        return f'[mirrors] {china}hub = "https://HOST" in cluster.toml names another'

    @property
    def how_to_enter(self) -> str:
        """What a user does whom the hub asked for a token."""
        if self.withheld:
            return (
                f"HF_TOKEN is sent to {OWN_HOST} alone; if {self.host} may see it as well, set {TOKEN_HOST}={self.host}"
            )
        return "set HF_TOKEN in the environment, never in a command: read -rs HF_TOKEN && export HF_TOKEN"

    def refusal(self, repo: str, status: int) -> str:
        """What is said where the hub shows nobody, or not the owner of the token, what it holds."""
        if self.token:
            where = f"{self.address}/{repo}"
            return f"the hub refuses the token ({status}): it is wrong, or its owner has not accepted what {where} asks"
        return f"the hub asks for a token ({status}); {self.how_to_enter}"

    def asked(self, ask: Callable[[str | Literal[False]], T]) -> T:
        """The answer without a token; once more with it, if the hub asks for one and may have it. HubError where this
        machine's proxy or its certificates cannot be used."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            internet.proxy()
            if certificates := internet.ca_bundle():
                os.environ.pop("SSL_CERT_FILE", None)
                kind = "SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE"
                os.environ[kind] = certificates  # its client reads no other variables
        except internet.InternetError as error:
            raise HubError(str(error)) from None
        try:
            return ask(False)
        except HfHubHTTPError as error:
            if self.token is None or error.response.status_code not in NO_ENTRY:
                raise
        return ask(self.token)

    def told(self, ask: Callable[[str | Literal[False]], T]) -> T:
        """As `asked`, of what is said in a moment. SilentHubError where nobody is there, or nothing comes in
        ANSWER_S."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

        try:
            return within(ANSWER_S, lambda: self.asked(ask))
        except (HfHubHTTPError, OfflineModeIsEnabled):
            raise
        except (HTTPError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise SilentHubError(f"{self.address} does not answer ({reason})") from error


def hub_at(address: str, token: str | None, token_host: str) -> Hub:
    """The hub at an address; empty: the Hub itself. HubError for one that others on the way could read or change."""
    address = (address or f"https://{OWN_HOST}").rstrip("/")
    try:
        parts = urlsplit(address)
        host, named = parts.hostname or "", (parts.hostname or "", parts.netloc.lower())
    except ValueError:
        host, named = "", ("", "")
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))):
        raise HubError(f"the model hub {address}: https://HOST is expected, http:// on this very machine only")
    may_see = (host == OWN_HOST and parts.scheme == "https") or token_host.strip().lower() in named
    return Hub(address, token if may_see else None, withheld=bool(token) and not may_see)


def hub_of(environ: Mapping[str, str], token: str | None) -> Hub:
    """The hub of an environment: HF_ENDPOINT, and the host that its token is meant for."""
    return hub_at(environ.get("HF_ENDPOINT", ""), token, environ.get(TOKEN_HOST, ""))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def file_name(name: object) -> str:
    """A name from a hub, an index or a manifest, where it is one of a file inside its folder; else HubError."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or set(name) & set("\\*?[]")
        or any(part in ("", ".", "..") for part in name.split("/"))
    ):
        raise HubError(f"{name!r} is no name of a file inside its folder")
    return name


def place_of(folder: Path, name: object) -> Path:
    """Where a named file lies in a folder; HubError where that is outside, by its name or by a link."""
    place = folder / file_name(name)
    if not place.parent.resolve().is_relative_to(folder.resolve()):
        raise HubError(f"{name!r} leads out of {folder} by a link")
    return place


def commit_id(text: object) -> str:
    """A commit as a hub tells it; HubError for what is none."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text):
        raise HubError(f"{text!r} is no id of a commit")
    return text


def without_tokens() -> dict[str, str]:
    """This process's environment without what gives the hub's client a token."""
    hidden = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_OIDC_RESOURCE"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**environment, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
