"""This machine's own public address, asked of services that tell everyone theirs: who may reach the machines."""

from __future__ import annotations

import ipaddress
import re
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from inventory.cloud.errors import RentError

SERVICES = (
    "https://checkip.amazonaws.com",
    "https://api.ipify.org",
    "https://4.ipw.cn",
    "https://myip.ipip.net",
)
"""The last two answer from within China. Two of all must agree: a single one could open the door to itself."""
TIMEOUT_S = 5
LONGEST = 1000


def agreed(answers: Sequence[str], key: str) -> str:
    """The public IPv4 address most answers name, two at least. Pure. `key`: the setting that spares the question.

    Raises RentError: none answered, or they saw different ones (a VPN for some of the ways out).
    """
    seen = Counter(address for answer in answers if (address := _address(answer)))
    best = seen.most_common(2)
    if best and best[0][1] >= 2 and (len(best) == 1 or best[0][1] > best[1][1]):
        return best[0][0]
    saw = f"they saw {', '.join(sorted(seen))}" if seen else "no service told it"
    raise RentError(f'which address this machine is seen from is not clear ({saw}); set {key} = ["ADDRESS"]')


def _address(answer: str) -> str | None:
    for text in re.findall(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])", answer):
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError:
            continue
        if address.is_global:
            return str(address)
    return None


def public_address(key: str, services: Sequence[str] = SERVICES) -> str:
    """This machine's public IPv4 address. Raises RentError where two services do not agree on one."""
    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        return agreed(tuple(pool.map(_ask, services)), key)


def _ask(url: str) -> str:
    # Not through a proxy: ssh does not go through it either, so its address would be the wrong one.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"User-Agent": "curl/8"})  # others get a page of HTML
    try:
        with direct.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(LONGEST).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""
