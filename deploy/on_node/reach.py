"""Which places on the internet a node reaches not: `python3 -c THIS PLACE ...` on the node.

A PLACE is an address (https://HOST...), or `archives`: those that the node's own apt asks. Prints the ones that take no
connection, a line each, after 10 s at most; the exit code is 1 where that is all of them. A proxy that the environment
or apt names is tried in their place. Standard library only; it changes nothing.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from urllib.parse import urlsplit

ARCHIVES = "archives"
CONNECT_S, ALL_S = 5, 10
PORTS = {"http": 80, "https": 443}


def say(*argv: str) -> list[str]:
    """The lines a program prints; none where it is not there."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return []


def archives() -> dict[str, str]:
    """What apt asks, by the address of who is asked for it: the archive, or apt's proxy."""
    parts = map(urlsplit, say("apt-get", "indextargets", "--format", "$(SITE)"))
    sites = {f"{site.scheme}://{site.netloc}" for site in parts if site.scheme in PORTS}
    proxy = r'^Acquire::(https?)::Proxy "(.+)";$'
    config = dict(re.findall(proxy, "\n".join(say("apt-config", "dump")), re.MULTILINE))
    return {site: config.get(site.partition(":")[0], site) for site in sorted(sites)}


def asked(places: list[str]) -> dict[str, str]:
    """Every place by its address, and the address of who is asked for it."""
    proxies = urllib.request.getproxies()
    routes = archives() if ARCHIVES in places else {}
    for address in (place for place in places if place != ARCHIVES):
        parts = urlsplit(address)
        passed = urllib.request.proxy_bypass(parts.hostname or "")
        routes[f"{parts.scheme}://{parts.netloc}"] = address if passed else proxies.get(parts.scheme, address)
    return routes


def connects(address: str) -> bool:
    """Whether someone takes a connection there."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or PORTS.get(parts.scheme, 80)), CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def far(places: dict[str, str]) -> list[str]:
    """The places that are not reached."""
    with_answer: dict[str, Future[bool]] = {}
    pool = ThreadPoolExecutor(max_workers=16)
    for place, address in places.items():
        with_answer[place] = pool.submit(connects, address)
    wait(with_answer.values(), timeout=ALL_S)  # looking up a name knows no time-out
    return [place for place, answer in with_answer.items() if not (answer.done() and answer.result())]


def main() -> None:
    places = asked(sys.argv[1:])
    missing = far(places)
    print("\n".join(missing), flush=True)
    os._exit(1 if missing and len(missing) == len(places) else 0)  # past threads that still look a name up


if __name__ == "__main__":
    main()
