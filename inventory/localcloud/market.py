"""A spot market for the cloud on this machine: it takes machines back at random, and then has no more of their type
for a while. The same seed draws the same times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inventory.localcloud import control, served
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.dispatch import Fault, FaultFile
from inventory.localcloud.places import Places

HEAD = "te1"
TURN_S = 1.0


@dataclass(frozen=True)
class SpotMarket:
    """How it takes machines back. Seconds are of the cloud's clock, and means where they are drawn."""

    seed: int = 0
    every_s: float = 90.0
    notice_s: float = 60.0
    silent: float = 0.25
    """Share that gets no notice."""
    heads: float = 0.1
    """Share that are the head."""
    scarce_s: float = 60.0
    """How long the type is then out of stock in the zone."""

    def __post_init__(self) -> None:
        """Raises LocalCloudError for what is no market."""
        if not (self.every_s > 0 and min(self.notice_s, self.scarce_s) >= 0):
            raise LocalCloudError("a market takes a machine back every so many seconds, more than 0; none is negative")
        if not (0 <= self.silent <= 1 and 0 <= self.heads <= 1):
            raise LocalCloudError("the shares of a market are 0 to 100 percent")

    def draws(self) -> Iterator[Draw]:
        """One after the other, without an end."""
        dice, at_s = random.Random(self.seed), 0.0
        while True:
            at_s += dice.expovariate(1) * self.every_s
            notice_s = 0.0 if dice.random() < self.silent else self.notice_s
            is_head, which = dice.random() < self.heads, dice.random()
            yield Draw(at_s, notice_s, is_head, which, dice.expovariate(1) * self.scarce_s)


@dataclass(frozen=True)
class Draw:
    """One machine to be taken back."""

    at_s: float
    """After the market has opened."""
    notice_s: float
    """0: none."""
    is_head: bool
    which: float
    """0 to 1: the place, among the machines that stand, of the one that goes."""
    scarce_s: float

    def chosen(self, standing: dict[str, EmulatedInstance]) -> str:
        """The name of the machine among these; empty where there is none of that sort."""
        names = [name for name in standing if (name == HEAD) == self.is_head]
        return names[int(self.which * len(names))] if names else ""


def trade(places: Places, market: SpotMarket, seconds: float, say: Callable[[str], None]) -> int:
    """Take machines back for so many seconds of the cloud's clock; how many it took. Raises LocalCloudError."""
    faults, opened, taken = FaultFile(places.folder / "faults.json"), _now(places), 0
    scarce: dict[Fault, float] = {}
    draws = market.draws()
    draw = next(draws)
    try:
        while (now := _now(places) - opened) < seconds:
            for fault in [each for each, until in scarce.items() if until <= now]:
                faults.remove(fault)
                del scarce[fault]
            if draw.at_s <= now:
                if name := draw.chosen(_standing(places)):
                    fault = _take(places, name, draw, say)
                    if fault not in scarce:
                        faults.add(fault)
                    scarce[fault] = max(scarce.get(fault, 0.0), now + draw.scarce_s)
                    taken += 1
                draw = next(draws)
            time.sleep(TURN_S)
    finally:
        for fault in scarce:
            faults.remove(fault)
    return taken


def _take(places: Places, name: str, draw: Draw, say: Callable[[str], None]) -> Fault:
    """Take it back; what is then wrong with the cloud."""
    machine = served.find(places, name)
    control.call(places, "Reclaim", InstanceId=machine.instance_id, NoticeSeconds=str(draw.notice_s))
    how = f"in {draw.notice_s:g} s" if draw.notice_s else "without notice"
    say(f"{draw.at_s:6.0f} s  {name} is taken back {how}; no stock for {draw.scarce_s:.0f} s")
    return Fault("RunInstances", "no-stock", times=0, zone=machine.zone_id, instance_type=machine.instance_type)


def _standing(places: Places) -> dict[str, EmulatedInstance]:
    """Spot machines that run and are not on their way out, by name."""
    found = served.machines(places)
    spot = [each for each in found if each.status == "Running" and each.spot_strategy != "NoSpot"]
    return {served.short_name(places, each): each for each in spot if not each.reclaim_at}


def _now(places: Places) -> float:
    return float(control.call(places, "Now")["Now"])
