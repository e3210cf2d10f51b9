"""Messages about a run, to DingTalk, Feishu, WeCom, Slack, mail and others: what `[notify]` of cluster.toml asks for.

The addresses are apprise URLs, and most have a token in them. They come from a file that only its owner can read, or
from the environment, and go nowhere else: no sentence has more of one than its scheme, and apprise's own log, which
quotes whole URLs, is dropped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from inventory.errors import USER_MISTAKE, InventoryError
from inventory.renting.tags import StateFiles
from inventory.settings import NotifyKind, Settings

VARIABLE = "SPOTUNE_NOTIFY"
"""Environment variable with the addresses, separated by blanks; where it is set the file is not read."""
NO_APPRISE = "notifications need apprise, which is not installed: pip install -e '.[notify]'"
DELIVERY_S = 10.0
"""How long an address has to take a message."""
AGAIN_S = (60.0, 300.0)
"""How long after a failed try the next one may come; after the last one no more do."""
KEPT_KEYS = 300
"""How many messages of a cluster are remembered as sent."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9]{0,19})://")
OF_OWNER_ALONE = partial(os.open, mode=0o600)
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
class Message:
    """Something that happened, to be told once."""

    key: str
    """What makes it the same event for every command that sees it, such as RUN_ID and the time when the run ended."""
    kind: NotifyKind
    title: str
    body: str


Send = Callable[[Message], None]
"""Hands a message over; whether and when it goes out is not waited for."""


PRESENT: frozenset[NotifyKind] = frozenset({"reclaimed", "waiting", "budget"})


class News:
    """Messages about something that is looked at again and again. What had happened before the first look is no news,
    but for what still goes on then."""

    def __init__(self, send: Send | None) -> None:
        """`send` of None: nobody is to be told."""
        self.send = send
        self._old: set[str] | None = None

    def take(self, messages: Sequence[Message]) -> None:
        """What a look has shown."""
        if self._old is None:
            self._old = {message.key for message in messages if message.kind not in PRESENT}
        for message in messages:
            if self.send and message.key not in self._old:
                self.send(message)


@dataclass(frozen=True)
class NotifyAddress:
    """One place to send to."""

    scheme: str
    client: Any = field(repr=False)
    """apprise with this one URL in it."""


def notifier_or_none(settings: Settings, say: Callable[[str], None]) -> Notifier:
    """As `open_notifier`, for work that goes on without notifications where they are not set up well; that is said."""
    try:
        return open_notifier(settings, say)
    except NotifyError as error:
        say(f"no notifications: {error}")
        return Notifier((), (), _SentKeys(StateFiles.of(settings.name).folder), say)


def open_notifier(settings: Settings, say: Callable[[str], None]) -> Notifier:
    """The notifier of a cluster; one without addresses, where none are set up, sends nothing. `say` gets a sentence,
    once, for each way in which sending fails; another thread calls it. Raises NotifyError."""
    kinds = settings.notify.on
    addresses = configured_addresses(settings) if kinds else ()
    return Notifier(addresses, kinds, _SentKeys(StateFiles.of(settings.name).folder), say)


class Notifier:
    """Sends messages from a thread of its own, so that whoever follows a run waits for nobody."""

    def __init__(
        self,
        addresses: Sequence[NotifyAddress],
        kinds: Sequence[NotifyKind],
        sent: _SentKeys,
        say: Callable[[str], None],
    ) -> None:
        self._addresses = addresses
        self._kinds = kinds
        self._sent = sent
        self._say = say
        self._said = set[str]()
        self._queue = SimpleQueue[Message | None]()
        self._thread: threading.Thread | None = None
        self._tries = dict[str, int]()
        self._not_before = dict[str, float]()
        """By the monotonic clock, of each key; while it is being sent, and once it is sent or given up: never."""

    def send(self, message: Message) -> None:
        """Send to all addresses, if its kind is wanted and no command of this machine has sent its key for this
        cluster. Returns at once and raises nothing. A message that no address took may be sent again: those that come
        too soon are dropped."""
        if not self._addresses or message.kind not in self._kinds:
            return
        if time.monotonic() < self._not_before.get(message.key, 0.0):
            return
        self._not_before[message.key] = math.inf
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
            self._thread.start()
        self._queue.put(message)

    def close(self, wait_s: float = DELIVERY_S + 2) -> None:
        """Wait until what was given to `send` has been sent, but no longer than `wait_s`; the rest is dropped when the
        program ends."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            outcomes: list[str] = []
            try:
                outcomes = self._send_once(message)
            except OSError as error:
                self._say_once(f"no notifications: {error.filename or self._sent.folder}: {error.strerror}")
            tries = self._tries[message.key] = self._tries.get(message.key, 0) + 1
            if "" not in outcomes and tries <= len(AGAIN_S):
                self._not_before[message.key] = time.monotonic() + AGAIN_S[tries - 1]

    def _send_once(self, message: Message) -> list[str]:
        """What `deliver` gives. The lock is held while it is sent: another command that saw the same event waits, and
        then knows. Raises OSError where nothing can be remembered; then nothing is sent."""
        with self._sent.locked() as keys:
            if message.key in keys:
                return [""]
            outcomes = deliver(self._addresses, message)
            if "" in outcomes:
                keys.append(message.key)
        for address, reason in zip(self._addresses, outcomes, strict=True):
            if reason:
                self._say_once(f"no notification to {address.scheme}: {reason}; to try it: fab notify --test")
        return outcomes

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            with suppress(OSError, ValueError):  # nobody reads it any more
                self._say(sentence)


def deliver(addresses: Sequence[NotifyAddress], message: Message) -> list[str]:
    """Send a message to all addresses at the same time; for each, why it was not sent, or nothing. Takes no longer than
    DELIVERY_S and raises nothing."""
    deliveries = [_Delivery(address.client, message) for address in addresses]
    for delivery in deliveries:
        delivery.start()
    until = time.monotonic() + DELIVERY_S
    for delivery in deliveries:
        delivery.join(max(0.0, until - time.monotonic()))
    return [delivery.outcome for delivery in deliveries]


class _Delivery(threading.Thread):
    """One message to one address. If it hangs it is left behind, and does not keep the program from ending."""

    def __init__(self, client: Any, message: Message) -> None:
        super().__init__(name="notification", daemon=True)
        self._client = client
        self._message = message
        self._reason = "not accepted"
        self.outcome = f"no answer within {DELIVERY_S:g} s"
        """Why it was not sent, empty where it was."""

    def run(self) -> None:
        title = f"spotune: {self._message.title}"  # chat robots may demand a word, and this one is in all messages
        try:
            sent = bool(self._client.notify(title=title, body=self._message.body or title, body_format="text"))
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


class _SentKeys:
    """The keys of the last messages that were sent for a cluster, in a file that all commands of this machine share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[list[str]]:
        """The keys, which nobody else reads or writes meanwhile; what is appended is kept. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / "notified.lock", "a", opener=OF_OWNER_ALONE) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = self._read()
            before = len(keys)
            half = self.folder / "notified.half"
            with open(half, "w", encoding="utf-8", opener=OF_OWNER_ALONE) as file:  # before anything is sent
                yield keys
                json.dump(keys[-KEPT_KEYS:], file)
            if len(keys) > before:
                half.replace(self.folder / "notified.json")

    def _read(self) -> list[str]:
        try:
            keys = json.loads((self.folder / "notified.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return []
        return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def trial_message(settings: Settings) -> Message:
    """What `fab notify --test` sends."""
    return Message("test", "ended", f"test message of cluster {settings.name}", "Notifications of runs arrive here.")


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
