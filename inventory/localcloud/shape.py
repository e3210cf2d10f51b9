"""How fast a host's cable and CPU are: what was asked for of each, kept with it, and put into force.

    python -m inventory.localcloud.shape CLOUD MACHINE      what the host's keeper runs at every boot

What is asked of all hosts lies in the cloud's folder and holds for those that boot later; what is asked of one lies in
that one's, holds over its boots, and goes with the machine.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from inventory.localcloud import inside, network
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.places import Places, alone

LEAST_MBIT, MOST_MBIT = 0.1, 10000.0
"""Below, a page of text takes longer than a program waits; above, veth pairs are no faster themselves."""
LEAST_CPU = 0.1
"""Cores. The kernel takes no quota below 1 ms of a period."""
LINK_TIMEOUT_S = 20


@dataclass(frozen=True)
class Shape:
    """A host's limits; None: as fast as it goes."""

    mbit: float | None = None
    """Mbit/s of its cable, each way."""
    cpu: float | None = None
    """Cores."""

    def __str__(self) -> str:
        parts = [f"{self.mbit:g} Mbit/s each way"] if self.mbit else []
        return ", ".join(parts + ([f"{self.cpu:g} core{'s' * (self.cpu != 1)}"] if self.cpu else []))


def asked(mbit: str, cpu: str, off: bool, cores: int) -> Shape:
    """The shape that a command line wants, whole: what it does not name is not limited. Raises LocalCloudError."""
    if off and (mbit or cpu):
        raise LocalCloudError("--off takes every limit away; leave --mbit and --cpu out with it")
    if not (off or mbit or cpu):
        raise LocalCloudError("say --mbit N, --cpu N or both; --off takes the limits away")
    return Shape(
        _number("--mbit", mbit, LEAST_MBIT, MOST_MBIT, "a link takes Mbit/s from {} to {}") if mbit else None,
        _number("--cpu", cpu, LEAST_CPU, cores, "a host takes from {} to {} cores of this machine's") if cpu else None,
    )


def _number(flag: str, text: str, least: float, most: float, rule: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise LocalCloudError(f"{flag} {text}: {rule.format(f'{least:g}', f'{most:g}')}")
    return value


def of_host(places: Places, machine: str) -> Shape:
    """What was asked of a host last, of it alone or of all. Raises LocalCloudError."""
    return _read(_own(places, machine)) or for_later(places)


def for_later(places: Places) -> Shape:
    """What was asked of all hosts: those that boot for the first time get it."""
    return _read(_common(places)) or Shape()


def ask_all(places: Places, shape: Shape) -> None:
    """Of every host, whatever was asked of it alone before, and of those to come."""
    _common(places).write_text(_text(shape))
    for own in places.folder.glob(f"hosts/*/{_common(places).name}"):
        own.unlink()


def ask_one(places: Places, machine: str, shape: Shape) -> None:
    """Of one host, whatever is asked of all."""
    _own(places, machine).parent.mkdir(parents=True, exist_ok=True)
    _own(places, machine).write_text(_text(shape))


def _common(places: Places) -> Path:
    return places.folder / "shape.json"


def _own(places: Places, machine: str) -> Path:
    return places.host(machine) / "shape.json"


def _text(shape: Shape) -> str:
    return json.dumps(asdict(shape)) + "\n"


def _read(file: Path) -> Shape | None:
    try:
        return Shape(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise LocalCloudError(f"{file} cannot be read: {error}; say the shape again: fab local.shape") from None


def apply(places: Places, machine: str) -> None:
    """Put into force on a host what was asked of it: at once where it runs, otherwise its next boot does. Repeating it
    changes nothing. Raises LocalCloudError."""
    with alone(places.folder / "shape.lock"):  # a boot and a command may meet
        leader = inside.leader(places, machine)
        if leader is not None:
            shape = of_host(places, machine)
            network.slow(places.link(machine), leader, shape.mbit)
            inside.limit_cpu(places.group(machine), shape.cpu)


def in_force(places: Places, machine: str) -> Shape:
    """What the kernel says of a host; without limits where it does not run."""
    return Shape(network.rate_mbit(places.link(machine)), inside.cpu_limit(places.group(machine)))


def at_boot(places: Places, machine: str) -> str:
    """A shell command for a host that is about to boot: it waits for the cable; nothing where nothing was asked."""
    files = [shlex.quote(str(file)) for file in (_common(places), _own(places, machine))]
    argv = [sys.executable, "-m", "inventory.localcloud.shape", places.cloud, machine]
    checkout = shlex.quote(str(Path(__file__).parents[2]))
    return f"if [ -e {files[0]} ] || [ -e {files[1]} ]; then cd {checkout} && exec {shlex.join(argv)}; fi"


def main() -> None:
    places, machine = Places.of(sys.argv[1]), sys.argv[2]
    _wait((network.INTERFACES / places.link(machine)).exists)
    _wait(lambda: inside.leader(places, machine) is not None)
    apply(places, machine)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"no host and no cable within {LINK_TIMEOUT_S} s: nothing is slowed")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
