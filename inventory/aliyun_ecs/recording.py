"""Scrubbed answers as files, so that a user with an account can give us samples: Action-001.json, ..."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import itertools
import json
import os
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "SPOTUNE_ECS_RECORD"
"""Environment variable that names the folder to record into."""


class Recording:
    """A folder that every answer is written to, without what it tells about its owner."""

    def __init__(self, folder: Path, state: Path) -> None:
        """The salt lies in the state folder, away from the answers: those may be given away."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._scrubber = Scrubber(_salt(state / "recording.salt"))

    def keep(self, action: str, answer: Any) -> Path:
        """Write an answer under the next free number."""
        text = json.dumps(self._scrubber.answer(answer), indent=1, ensure_ascii=False)
        for number in itertools.count(1):
            path = self._folder / f"{action}-{number:03d}.json"
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text + "\n")
            except FileExistsError:
                continue
            return path
        raise AssertionError  # the count has no end


def _salt(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        salt = secrets.token_bytes(32)
        file.write(salt)
    return salt


# Answers of the API without what they tell about their owner, in the same shape.
#
# Everything is replaced but what is known to be harmless: numbers, booleans, times, and texts of the API's own
# vocabulary. The same original gets the same replacement as long as the salt is the same, so that answers still fit
# together.

VOCABULARY = re.compile(
    "Architecture|Category|ChargeType|CloudAssistantStatus|Code|Currency|Device|Direction|DiskChargeType|GPUSpec"
    "|HostId|HttpEndpoint|HttpTokens|ImageOwnerAlias|InstanceChargeType|InstanceNetworkType|InstanceType"
    "|InstanceTypeFamily|InstanceTypeId|InternetChargeType|InterruptRateDesc|InvocationStatus|InvokeRecordStatus"
    "|IoOptimized|IpProtocol|LocalStorageCategory|LockReason|NetworkType|NvmeSupport|OSName|OSNameEn|OSType"
    "|PerformanceLevel|PhysicalProcessorModel|Platform|Policy|PortRange|Priority|Progress|RegionId|Resource"
    "|ResourceType|SaleCycle|SecurityGroupType|SnapshotType|SourceDiskType|SpotInterruptionBehavior|SpotStrategy"
    "|Status|StatusCategory|StoppedMode|Tenancy|Type|Usage|ZoneId"
)
"""Keys whose texts are the API's own words, not the account's."""
OWNED_NUMBERS = frozenset({"OwnerId", "AliUid", "UserId", "AccountId", "ImageOwnerId", "ParentId"})
HARMLESS = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?Z"  # a time
    r"|-?\d{1,9}(\.\d+)?%?"  # a number as text, shorter than an account's id
    r"|(true|false)"
    r"|acs:[\w.]+|[\w.]*_alibase_\d{8}\.vhd"  # public images
    r"|ecs\.[a-z][\w.-]+|cloud(_\w+)?",  # types of machines and disks
    re.IGNORECASE,
)
ID = re.compile(r"((?:i|d|s|m|t|c|e|sg|sgr|sl|vpc|vsw|vtb|vrt|eni|eip|rg|lt|dh|dc|ds|cr|hpc)-)([0-9a-z]{12,})")
ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
OURS_TO_KEEP = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "0.0.0.0/8")
PRIVATE = [ipaddress.ip_network(each) for each in OURS_TO_KEEP]
STAND_IN = ipaddress.ip_network("198.18.0.0/15")
"""Kept for benchmarks (RFC 2544): nobody's address."""


class Scrubber:
    """Replaces with one salt. Without the salt a replacement cannot be traced back by trying originals."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    def answer(self, answer: Any, key: str = "") -> Any:
        """The answer, or part of it under a key, without originals; keys, types and forms are the same."""
        if isinstance(answer, Mapping):
            return {name: self.answer(value, name) for name, value in answer.items()}
        if isinstance(answer, list):
            return [self.answer(value, key) for value in answer]
        if isinstance(answer, str):
            return self._text(answer, key)
        if key in OWNED_NUMBERS and isinstance(answer, int) and not isinstance(answer, bool):
            return int(self._alike(str(answer)))
        return answer

    def _text(self, text: str, key: str) -> str:
        if not text or HARMLESS.fullmatch(text) or VOCABULARY.fullmatch(key):
            return text
        if key == "Message":  # an error's: words around what it names
            return self._message(text)
        if match := ID.fullmatch(text):
            return match[1] + self._alike(match[2])
        if re.fullmatch(r"[\d./, ]+", text) and ADDRESS.search(text):
            return ADDRESS.sub(lambda address: self._address(address[0]), text)
        return self._alike(text)

    def _message(self, text: str) -> str:
        """Sentences of the API keep their plain words; anything with a digit, quotes or a dash in it is replaced."""
        return " ".join(
            word if re.fullmatch(r"[A-Za-z]{1,14}[.,;:]?", word) else self._alike(word) for word in text.split(" ")
        )

    def _address(self, text: str) -> str:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return self._alike(text)
        if any(address in network for network in PRIVATE):
            return text
        number = int.from_bytes(self._stream(text, 4), "big")
        return str(STAND_IN[number % STAND_IN.num_addresses])

    def _alike(self, text: str) -> str:
        """As long, letters for letters, digits for digits, hexadecimal for hexadecimal; the rest stays."""
        of_hex = re.fullmatch(r"[0-9A-Fa-f:-]{8,}", text) is not None
        stream = self._stream(text, len(text))
        return "".join(_instead(letter, byte, of_hex) for letter, byte in zip(text, stream, strict=True))

    def _stream(self, text: str, length: int) -> bytes:
        def blocks() -> Iterator[bytes]:
            for block in range(length // 32 + 1):
                yield hmac.new(self._salt, f"{block}:{text}".encode(), hashlib.sha256).digest()

        return b"".join(blocks())[:length]


def _instead(letter: str, byte: int, of_hex: bool) -> str:
    if letter in string.digits:
        return string.digits[1 + byte % 9]  # no 0: a number stays as long
    if letter in string.ascii_lowercase:
        return "abcdef"[byte % 6] if of_hex else string.ascii_lowercase[byte % 26]
    if letter in string.ascii_uppercase:
        return "ABCDEF"[byte % 6] if of_hex else string.ascii_uppercase[byte % 26]
    return letter if letter in string.punctuation + string.whitespace else "x"
