"""Who reaches the machines: from which addresses, with which ssh key, and which host keys are theirs. Nothing is
trusted on first sight."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import shlex
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

from inventory import hostkeys
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import NetworkRequest
from inventory.renting import tags
from inventory.renting.tags import StateFiles
from inventory.settings import Settings

KINDS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")

IMPORTED = tuple(kind for kind in KINDS if kind != "ssh-ed25519")
"""Kinds of key the vendor says a key pair can be made of."""


def pair_name(cluster: str, public_key: str) -> str:
    """The name of a key's pair in the cloud: another key is another pair, so none is ever taken for another."""
    digest = hashlib.sha256(" ".join(public_key.split()[:2]).encode()).hexdigest()
    return f"spotune-{cluster}-{digest[:12]}"


def private_key(settings: Settings, pair: str = "") -> Path:
    """The private key of a machine: the one its pair was made of, else the settings' own where the cloud
    takes it, else the cluster's."""
    own_key = StateFiles.of(settings.name).own_key
    for key in (settings.ssh.key, own_key):
        if pair and (public_key := public(key)) and pair_name(settings.name, public_key) == pair:
            return key
    return settings.ssh.key if settings.ssh.key.is_file() and not _refused_kind(settings) else own_key


def public(key: Path) -> str:
    """The key's public half; empty where it cannot be read."""
    try:
        return key.with_name(f"{key.name}.pub").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _refused_kind(settings: Settings) -> str:
    """What kind of key the settings' own is, where that is none the cloud takes; else empty."""
    kind = public(settings.ssh.key).partition(" ")[0]
    return "" if kind in IMPORTED else kind


def note(settings: Settings) -> str:
    """A sentence where new machines are not reached with the settings' key; empty where they are."""
    key, reason = settings.ssh.key, ""
    if not key.is_file():
        reason = f"there is no private key at {key}" if "key" in settings.ssh.model_fields_set else ""
    elif kind := _refused_kind(settings):
        reason = f"the cloud takes no {kind} key, as {key} is"
    return f"{reason}: new machines get the cluster's, {StateFiles.of(settings.name).own_key}" if reason else ""


def ensure_key(settings: Settings) -> str:
    """The public key for new machines; where ssh.key does not exist or is of a kind the cloud does not
    take, one of the cluster's own is made, once.

    Raises RentError where the settings' key has no public half that can be read.
    """
    key = private_key(settings)
    if not key.exists():
        StateFiles.of(settings.name).make()
        _make_key(key, f"spotune-{settings.name}")
    if public_key := public(key):
        return public_key
    file = key.with_name(f"{key.name}.pub")
    make = f"ssh-keygen -y -f {shlex.quote(str(key))} > {shlex.quote(str(file))}"
    raise RentError(f"ssh.key: {key} has no public half beside it; make it: {make}")


def _make_key(key: Path, comment: str) -> None:
    """Both halves, made aside: where we are killed, ssh-keygen goes on and would write beside the next one's."""
    fresh = key.with_name(f".{key.name}.{secrets.token_hex(4)}")
    halves = (fresh.with_name(f"{fresh.name}.pub"), key.with_name(f"{key.name}.pub")), (fresh, key)
    try:
        argv = ["ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-C", comment, "-f", str(fresh)]
        subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if not key.exists():  # another command may have been faster
            for made, place in halves:
                made.replace(place)
    except FileNotFoundError:
        raise RentError("there is no ssh-keygen here; it comes with the OpenSSH client") from None
    except subprocess.CalledProcessError as error:
        raise RentError(f"ssh-keygen made no key: {error.stderr.strip() or error.stdout.strip()}") from None
    finally:
        for made, _ in halves:
            made.unlink(missing_ok=True)


def network_request(settings: Settings, ssh_from: Sequence[str], *, with_key: bool) -> NetworkRequest:
    """What new machines need, with the key they are given; without one only from where they are reached. Raises
    RentError where there is no key to give."""
    own = tags.of_cluster(settings.name)
    request = NetworkRequest(settings.name, own, tuple(ssh_from), settings.rental.vpc)
    if not with_key:
        return request
    public_key = ensure_key(settings)
    return replace(request, key_pair=pair_name(settings.name, public_key), public_key=public_key)


def shown(output: str) -> tuple[hostkeys.HostKey, ...]:
    """The host keys in what a machine printed of its .pub files. Pure."""
    words = [line.split() for line in output.splitlines()]
    return tuple(sorted(hostkeys.HostKey(w[0], w[1]) for w in words if len(w) >= 2 and w[0] in KINDS))


def pinned(known_hosts: str, address: str, instance_id: str, keys: Sequence[hostkeys.HostKey]) -> str:
    """known_hosts with exactly these keys for an address: whoever had it before is another machine. Pure."""
    other_hosts = hostkeys.without_host(known_hosts, address)
    return other_hosts + "".join(f"{address} {key.kind} {key.blob} {instance_id}\n" for key in keys)


def is_pinned(known_hosts: str, address: str, instance_id: str) -> bool:
    """Whether the keys known for an address are this machine's. Pure."""
    lines = [line.split() for line in known_hosts.splitlines()]
    return any(len(w) == 4 and w[0] == address and w[3] == instance_id for w in lines)


def asked(cloud: Cloud, instance_id: str) -> tuple[hostkeys.HostKey, ...]:
    """A machine's host keys, as the cloud tells them. Raises CloudError where it tells none."""
    keys = shown(cloud.host_keys(instance_id))
    if not keys:
        raise CloudError(f"{instance_id} shows no ssh host key; again: fab up", Kind.WAIT)
    return keys


def pin_all(cloud: Cloud, settings: Settings, addresses: Mapping[str, str], *, again: bool = False) -> None:
    """Pin the host keys of machines (their addresses by id) whose address was another's, or none's, until now;
    `again`: of all. Raises CloudError.
    """
    before = known(settings)
    new = [each for each, address in addresses.items() if again or not is_pinned(before, address, each)]
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(new)))) as pool:
        for each, keys in zip(new, pool.map(lambda i: asked(cloud, i), new), strict=True):
            pin(settings, each, addresses[each], keys)


def known(settings: Settings) -> str:
    """What the cluster's known_hosts says."""
    return hostkeys.read(StateFiles.of(settings.name).known_hosts)


def pin(settings: Settings, instance_id: str, address: str, keys: Sequence[hostkeys.HostKey]) -> None:
    """Write a machine's host keys down, before anything connects to it."""
    files = StateFiles.of(settings.name)
    files.make()
    hostkeys.write(files.known_hosts, pinned(known(settings), address, instance_id, keys))


def forget(settings: Settings, addresses: Sequence[str]) -> None:
    """Drop the host keys at addresses whose machines are gone: they will be somebody else's."""
    text = before = known(settings)
    for address in filter(None, addresses):
        text = hostkeys.without_host(text, address)
    if text != before:
        hostkeys.write(StateFiles.of(settings.name).known_hosts, text)


def networks(addresses: Sequence[str]) -> tuple[str, ...]:
    """Addresses and networks in CIDR notation. Pure."""
    return tuple(sorted({str(IPv4Network(each, strict=False)) for each in addresses}))


def ssh_sources(settings: Settings) -> tuple[str, ...]:
    """Where ssh may come from, in CIDR notation. Raises RentError where it cannot be found out."""
    own = settings.rental
    if own.ssh_from:
        return networks(own.ssh_from)
    if settings.on_this_machine:  # the hosts see us as their gateway
        return networks([str(IPv4Network(settings.local.subnet)[1])])
    return networks([public_address(own.key("ssh_from"))])


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


def public_address(key: str) -> str:
    """This machine's public IPv4 address. Raises RentError where two services do not agree on one."""
    with ThreadPoolExecutor(max_workers=len(SERVICES)) as pool:
        return agreed(tuple(pool.map(_ask, SERVICES)), key)


def _ask(url: str) -> str:
    # Not through a proxy: ssh does not go through it either, so its address would be the wrong one.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"User-Agent": "curl/8"})  # others get a page of HTML
    try:
        with direct.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(LONGEST).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return ""
