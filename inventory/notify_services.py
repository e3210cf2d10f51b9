"""Where notifications go: apprise URLs, which are secrets, and one message to each.

They come from a file that only its owner can read, or from the environment, and go nowhere else: no sentence has more
of one than its scheme, and apprise's own log, which quotes whole URLs, is dropped.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from inventory.errors import USER_MISTAKE, InventoryError
from inventory.settings import Settings

VARIABLE = "SPOTUNE_NOTIFY"
"""Environment variable with the addresses, separated by blanks; where it is set the file is not read."""
NO_APPRISE = "notifications need apprise, which is not installed: pip install -e '.[notify]'"
DELIVERY_S = 10.0
"""How long an address has to take a message."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9]{0,19})://")
ANSWERS_200_TO_ALL = ("dingtalk", "feishu", "lark", "wecombot")
"""Services that refuse with HTTP 200 and a code in the answer, which apprise takes for a success: of the first and the
last in 2.3 too, of all in 1.9."""
REASONS = (
    (re.compile(r"\b(error|code)=(\d{1,9})\b"), r"\1 \2"),
    (re.compile(r"certificate verify failed|CERTIFICATE_VERIFY_FAILED"), "its certificate is not trusted"),
    (re.compile(r"ProxyError|Cannot connect to proxy"), "the proxy does not let it through"),
    (re.compile(r"NameResolutionError|Name or service not known|getaddrinfo"), "its host name is not known"),
    (re.compile(r"Connection refused"), "connection refused"),
    (re.compile(r"[Tt]imed out"), "no answer"),
    (re.compile(r"[Cc]onnection error"), "no connection"),
)
"""What is said of a failure, by what apprise logs of it: never its own words, which may have the URL in them."""


class NotifyError(InventoryError):
    """Notifications cannot be sent as they are set up."""

    exit_code = USER_MISTAKE


@dataclass(frozen=True)
class NotifyAddress:
    """One place to send to."""

    scheme: str
    client: Any = field(repr=False)
    """apprise with this one URL in it."""


def deliver(addresses: Sequence[NotifyAddress], title: str, body: str) -> list[str]:
    """Send a message to all addresses at the same time; for each, why it was not sent, or nothing. Takes no longer than
    DELIVERY_S and raises nothing."""
    deliveries = [_Delivery(address.client, title, body) for address in addresses]
    for delivery in deliveries:
        delivery.start()
    until = time.monotonic() + DELIVERY_S
    for delivery in deliveries:
        delivery.join(max(0.0, until - time.monotonic()))
    return [delivery.outcome for delivery in deliveries]


class _Delivery(threading.Thread):
    """One message to one address. If it hangs it is left behind, and does not keep the program from ending."""

    def __init__(self, client: Any, title: str, body: str) -> None:
        super().__init__(name="notification", daemon=True)
        self._client = client
        self._title = f"spotune: {title}"  # chat robots may demand a word, and this one is in all messages
        self._body = body or self._title
        self._reason = "not accepted"
        self.outcome = f"no answer within {DELIVERY_S:g} s"
        """Why it was not sent, empty where it was."""

    def run(self) -> None:
        try:
            sent = bool(self._client.notify(title=self._title, body=self._body, body_format="text"))
        except Exception as error:  # of any of apprise's plugins; its text may have the URL in it
            self.outcome = type(error).__name__
        else:
            self.outcome = "" if sent else self._reason

    def hear(self, record: logging.LogRecord) -> None:
        """Learn from what is logged during this delivery why it fails."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING or text.startswith("Socket Exception"):
            for pattern, reason in REASONS:
                if match := pattern.search(text):
                    self._reason = match.expand(reason)
                    return


def _keep_quiet(record: logging.LogRecord) -> bool:
    """Drop all that apprise logs, and what urllib3 logs for it, paths with tokens included; a delivery hears it."""
    thread = threading.current_thread()
    if not isinstance(thread, _Delivery):
        return record.name != "apprise"
    thread.hear(record)
    return False


def configured_addresses(settings: Settings) -> tuple[NotifyAddress, ...]:
    """Where messages go: the addresses in the environment, else those of the file; none where neither is there. Raises
    NotifyError: others can read the file, apprise is not installed, or does not know an address."""
    words = os.environ.get(VARIABLE)
    if words is None:
        urls = _urls_of(settings.notify.file)
    else:
        urls = {f"{VARIABLE}, address {number}": url for number, url in enumerate(words.split(), start=1)}
    return _opened(urls) if urls else ()


def _urls_of(path: Path) -> dict[str, str]:
    """The URLs in a file, by the place of each; none where there is no file. Raises NotifyError."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise NotifyError(f"{path} can be read by others, and has secrets in it: chmod 600 {path}")
            lines = [line.strip() for line in file]
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise NotifyError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise NotifyError(f"{path} cannot be read: {error.strerror}") from None
    numbered = enumerate(lines, start=1)
    return {f"{path}, line {number}": line for number, line in numbered if line and not line.startswith("#")}


def _opened(urls: Mapping[str, str]) -> tuple[NotifyAddress, ...]:
    """The addresses of these URLs, which are named by their places. Raises NotifyError."""
    try:
        import apprise  # loads more than a hundred services, and few users have it
    except ImportError:
        raise NotifyError(NO_APPRISE) from None
    logging.getLogger("apprise").setLevel(logging.DEBUG)
    for name in ("apprise", "urllib3.connectionpool"):
        logging.getLogger(name).addFilter(_keep_quiet)
    has_deadline = "service_timeout" in signature(apprise.AppriseAsset).parameters  # from 2 on; it takes other threads
    deadline = {"service_timeout": 0} if has_deadline else {}
    asset = apprise.AppriseAsset(app_id="spotune", app_desc="spotune", async_mode=False, **deadline)
    addresses = []
    for place, url in urls.items():
        scheme = match[1].lower() if (match := SCHEME.match(url)) else ""
        service = _service(apprise.Apprise, url, asset)
        if service is None:
            wrong = f"apprise knows no such {scheme}:// address" if scheme else "an address begins with SCHEME://"
            raise NotifyError(f"{place}: {wrong}; https://appriseit.com/services/ lists them")
        service.verify_certificate = True  # whatever the URL says
        service.request_rate_per_sec = 0  # else apprise waits 5.5 s between two messages, of the 10 that one has
        service.socket_read_timeout = DELIVERY_S  # else 4 s: less than a proxy far away may need
        if service.schema in ANSWERS_200_TO_ALL:
            _check_answers(service)
        client = apprise.Apprise(asset=asset)
        client.add(service)
        addresses.append(NotifyAddress(service.schema, client))
    return tuple(addresses)


def _service(apprise: Any, url: str, asset: Any) -> Any:
    """What apprise makes of a URL; None where it makes nothing of it."""
    try:
        return apprise.instantiate(url, asset=asset)
    except Exception:  # the error, or one before it, may quote the URL
        return None


class _CheckedRequests:
    """`requests`, for a plugin that does not read the answers."""

    def __init__(self, requests: Any) -> None:
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    def post(self, *arguments: Any, **options: Any) -> Any:
        """As `requests.post`, but an answer with another code than 0 is no success."""
        answer = self._requests.post(*arguments, **options)
        with suppress(ValueError):
            content = answer.json()
            if isinstance(content, dict) and (code := content.get("errcode") or content.get("code")):
                raise self._requests.RequestException(f"code={code}")
        return answer


def _check_answers(service: Any) -> None:
    """Let the plugin of a service refuse what the service refuses."""
    plugin: Any = sys.modules[type(service).__module__]
    if not isinstance(plugin.requests, _CheckedRequests):
        plugin.requests = _CheckedRequests(plugin.requests)
