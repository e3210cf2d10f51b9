"""The spot market of the cloud on this machine: what it takes back, and when."""

from itertools import islice, takewhile
from types import SimpleNamespace

import pytest

from inventory.localcloud import market
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs.dispatch import FaultFile
from inventory.localcloud.market import SpotMarket, trade


def test_the_same_seed_draws_the_same_and_the_shares_are_those_that_were_asked_for():
    asked = SpotMarket(seed=7, every_s=90, silent=0.25, heads=0.1, scarce_s=60)
    drawn = list(islice(asked.draws(), 4000))
    assert drawn[:50] == list(islice(asked.draws(), 50)) != list(islice(SpotMarket(seed=8).draws(), 50))
    assert drawn[-1].at_s / len(drawn) == pytest.approx(90, rel=0.05)
    assert sum(not draw.notice_s for draw in drawn) / len(drawn) == pytest.approx(0.25, abs=0.03)
    assert sum(draw.is_head for draw in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)
    assert sum(draw.scarce_s for draw in drawn) / len(drawn) == pytest.approx(60, rel=0.1)


@pytest.mark.parametrize("wrong", [{"every_s": 0}, {"notice_s": -1}, {"scarce_s": -1}, {"silent": 1.5}, {"heads": -1}])
def test_what_is_no_market_is_refused(wrong):
    with pytest.raises(LocalCloudError):
        SpotMarket(**wrong)


class World:
    """A cloud whose clock is a second further at each look."""

    def __init__(self, folder):
        self.folder, self.clock, self.taken, self.scarce = folder, 1000.0, [], []
        self.instances = [self.machine(k) for k in (1, 2, 3)] + [self.machine(4, spot_strategy="NoSpot")]

    def machine(self, k, **more):
        known = {"instance_id": f"i-{k}", "name": f"demo-te{k}", "zone_id": f"z-{k}", "instance_type": "ecs.local"}
        state = {"status": "Running", "spot_strategy": "SpotWithPriceLimit", "reclaim_at": 0}
        return SimpleNamespace(**known, **{**state, **more})

    def call(self, places, action, **parameters):
        if action == "Now":
            self.clock += 1
            file = self.folder / "faults.json"
            self.scarce.append(file.read_text().count("no-stock") if file.exists() else 0)
            return {"Now": self.clock}
        self.taken.append((parameters["InstanceId"], float(parameters["NoticeSeconds"]), self.clock - 1001))
        next(each for each in self.instances if each.instance_id == parameters["InstanceId"]).reclaim_at = self.clock
        return {}


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.setattr(market.control, "call", world.call)
    monkeypatch.setattr(market.served, "machines", lambda places: tuple(world.instances))
    monkeypatch.setattr(market, "TURN_S", 0.0)
    return world


def test_spot_machines_go_at_their_times_once_each_and_stock_is_out_and_comes_back(world, tmp_path):
    asked = SpotMarket(seed=1, every_s=20, scarce_s=15, heads=0.3)
    places = SimpleNamespace(folder=tmp_path, cloud="demo")
    taken = trade(places, asked, 400, lambda line: None)
    assert taken == len(world.taken) == 3 and {each for each, _, _ in world.taken} == {"i-1", "i-2", "i-3"}
    due = [draw.at_s for draw in takewhile(lambda draw: draw.at_s < 400, asked.draws())]
    assert all(any(0 <= at - each < 3 for each in due) for _, _, at in world.taken)
    assert max(world.scarce) >= 1 and world.scarce[-1] == 0
    assert FaultFile(tmp_path / "faults.json").take("RunInstances", "z-2", "ecs.local") is None
