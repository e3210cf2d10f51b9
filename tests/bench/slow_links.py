"""Rows on slow links: strategies measured against each other and against what the plan says of them.

Four hosts with half a core each, so that a stage that waits lends nobody its core, and links whose rate goes by the
hosts' own computing: at `middle` gathering the weights takes five times as long as computing with them, as a 14B does
on four A10s at 16 Gbit/s; `fast` and `slow` are 3.5 times that and a 3.5th (about 120, 33 and 10 Mbit/s). A strategy is
launched once, by `fab train`, and the links change while it runs; seconds are its own, of metrics.jsonl, without the
step in which they changed.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from pathlib import Path

from tests.bench import slow_model
from tests.bench.rows import CommandFailed, Measure, Row, checked, compared
from tests.support.llama_shape import model_shape
from tests.support.local_cluster import LocalCluster, run_id_in
from tests.support.ssh_program import ssh_options
from tests.support.waiting import until
from training.cost.cards import Rates
from training.cost.pace import LINE_SHARE, pace
from training.cost.shape import ModelShape
from training.cost.strategies import STRATEGIES
from training.models.names import load_recipe
from training.plan.machines import PlannedMachines
from training.plan.options import Choice, choose
from training.recipe.recipe import Recipe

CPU = 0.5
OTHER_CPU = 1.0
GATHERING = 5.0
"""Times computing, at the middle rate."""
STEP_APART = 3.5
COUNTED = 3
"""Steps of each strategy at each rate."""
SETTLING = 8
"""Steps before the first that count: the command that started the run, and what a process does but once, take part of
two cores."""
CLOSE = 0.3
"""Of the planned seconds: how near what is measured should be."""
MODEL = "slow-links"
START_S, STEP_S = 180, 180
DEEPER, UNEVEN, EVEN = "deeper", (4, 8), (6, 6)
NAMES = ("pipeline_vs_zero3", "auto_vs_worst_fit", "plan_vs_measured", "uneven_vs_even_split")
ALL = tuple(name for name in ("zero0", "zero2", "zero3", "pipeline") if name in STRATEGIES)
SETTINGS = {
    "model_dir": MODEL,
    "max_length": str(slow_model.LENGTH),
    "global_batch": str(slow_model.ROWS),
    "micro_batch": "1",
    "steps": "1000",
    "save_every": "1000",
    "gradient_checkpointing": "false",
    "lora.rank": "4",
    "lora.dropout": "0.0",
    "optimizer.lr": "1e-4",
    "optimizer.schedule": "constant",
    "logging.tensorboard": "false",
}


def recipe_of(settings: Mapping[str, str]) -> Recipe:
    return load_recipe("tiny", {**SETTINGS, **settings})


@dataclass
class Running:
    """A run that trains, seen from this machine without using the hosts' links or cores."""

    run_id: str
    metrics: Path

    def seconds(self) -> list[float]:
        """Of each step so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line)["step_s"] for line in self.metrics.read_text().splitlines() if line.endswith("}")]

    def next(self, count: int) -> list[float]:
        """Of so many whole steps from now on."""
        from_here = len(self.seconds()) + 1
        until(lambda: len(self.seconds()) >= from_here + count, f"{count} steps of {self.run_id}", STEP_S * count)
        return self.seconds()[from_here : from_here + count]


@dataclass
class Ground:
    """Hosts, the model on each of them, and what was measured."""

    local: LocalCluster
    folder: Path
    compute_s: float = 0.0
    """Of a step whose rows are dealt out to four hosts, by the first strategy without a slow link: the calibration."""
    unhindered: dict[str, float] = field(default_factory=dict)
    """Seconds of a step of each strategy on links that nothing slows."""
    seconds: dict[str, dict[float, list[float]]] = field(default_factory=dict)
    """Of each strategy at each rate in Mbit/s."""
    launched: dict[str, dict[str, str]] = field(default_factory=dict)
    """Each strategy's own settings of the recipe."""

    def shape(self, *flags: str) -> None:
        checked(self.local.fab("local.shape", *flags))

    @cached_property
    def model(self) -> ModelShape:
        """Of the model, which is made and put on every host."""
        return self.put(MODEL)

    def put(self, name: str, layers: int = 8) -> ModelShape:
        """The shape of a model that is made and put on every host."""
        model = self.folder / name
        slow_model.write(model, layers)
        for node in self.local.cluster.nodes:
            packed = subprocess.Popen(["tar", "-C", self.folder, "-cf", "-", name], stdout=subprocess.PIPE)
            unpack = ["ssh", *ssh_options(node), f"{node.user}@{node.address}", "tar -C /data/models -xf -"]
            done = subprocess.run(unpack, stdin=packed.stdout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if packed.wait() or done.returncode:
                raise CommandFailed(f"the model does not get to {node.name}: {done.stdout.decode()}")
        return model_shape(json.loads((model / "config.json").read_text()))

    @contextmanager
    def running(self, settings: Mapping[str, str], local: LocalCluster | None = None) -> Iterator[Running]:
        """A run that has made its first steps; it is gone afterwards, and the hosts are as fast as they go."""
        local = local or self.local
        assert self.model
        flags = [part for key, value in {**SETTINGS, **settings}.items() for part in ("--set", f"{key}={value}")]
        run_id = run_id_in(checked(local.fab("train", "--model", "tiny", *flags, "--detach")))
        run = Running(run_id, self._on_head(f"data/runs/{run_id}/metrics.jsonl"))
        try:
            until(partial(self._has_begun, run), f"the first steps of {run_id}", START_S)
            yield run
        finally:
            self.shape("--off")
            local.fab("stop", "--run", run_id)

    def _has_begun(self, run: Running) -> bool:
        status = run.metrics.with_name("status.json")
        told = json.loads(status.read_text()) if status.exists() else {}
        if told.get("state") in ("failed", "stopped"):
            raise CommandFailed(f"{run.run_id}: {told['state']}: {told.get('reason')}")
        return len(run.seconds()) >= 2

    def _on_head(self, path: str) -> Path:
        from inventory.localcloud import inside, served
        from inventory.localcloud.places import Places

        with self.local.at_home():
            places = Places.of(self.local.name)
            return Path(f"/proc/{inside.leader(places, served.find(places, 'te1').machine)}/root") / path

    @cached_property
    def rates(self) -> tuple[float, float, float]:
        """Slow, middle and fast, in Mbit/s; everything is measured at them."""
        for strategy in ALL:
            self.launched[strategy] = {"strategy": strategy, **self._planned_table(strategy)}
            with self.running(self.launched[strategy]) as run:
                self._measure(strategy, run)
        return self._rates()

    def _planned_table(self, strategy: str) -> dict[str, str]:
        """How the plan would lay the layers at the middle rate, as the recipe's own keys, where a rank has not all."""
        if not self.compute_s:
            return {}
        planned = next(each for each in self.planned(self._rates()[1]).options if each.strategy == strategy)
        return {key: json.dumps(value) for key, value in planned.values.items() if key.startswith("pipeline.")}

    def _measure(self, strategy: str, run: Running) -> None:
        self.shape("--cpu", str(CPU))
        self.unhindered[strategy] = statistics.median(run.next(SETTLING + COUNTED)[SETTLING:])
        self.compute_s = self.compute_s or self.unhindered[strategy]
        for mbit in self._rates():
            self.shape("--mbit", str(mbit), "--cpu", str(CPU))
            self.seconds.setdefault(strategy, {})[mbit] = run.next(COUNTED)
            print(f"  {strategy} at {mbit:g} Mbit/s: {self.seconds[strategy][mbit]} s", flush=True)

    def _rates(self) -> tuple[float, float, float]:
        cost, recipe = STRATEGIES["zero3"], recipe_of({"strategy": "zero3"})
        received = cost.step(self.model, recipe, 4, slow_model.ROWS // 4).received_bytes
        middle = received / (GATHERING * self.compute_s) / LINE_SHARE * 8 / 1e6
        return (round(middle / STEP_APART, 1), round(middle, 1), round(middle * STEP_APART, 1))

    def machines(self, mbit: float) -> PlannedMachines:
        """The hosts, with the rate of computing as it was measured here."""
        recipe = recipe_of({"strategy": "zero0"})
        work = pace(self.model, recipe, 4, slow_model.LENGTH, Rates(1.0, inf)).compute_s
        assert work is not None
        return PlannedMachines(
            4, 1, None, inf, inf, 0.0, inf, Rates(work / self.compute_s, LINE_SHARE * mbit * 1e6 / 8)
        )

    def planned(self, mbit: float) -> Choice:
        """What the plan would take, of all strategies, and how it would lay their layers."""
        return choose(self.model, recipe_of({}), self.machines(mbit), free=("strategy",))

    def predicted(self, mbit: float) -> dict[str, float]:
        """Seconds of a step of each strategy as it was launched."""
        recipes = {name: recipe_of(settings) for name, settings in self.launched.items()}
        here = self.machines(mbit)
        return {
            name: choose(self.model, recipe, here, free=()).as_it_stands.order_s for name, recipe in recipes.items()
        }

    def of_its_own(self, strategy: str) -> float:
        """Seconds of a step that go neither into computing nor over the network: DeepSpeed's hooks, in Python."""
        return max(0.0, self.unhindered[strategy] - self.predicted(inf)[strategy])

    def median(self, strategy: str, mbit: float) -> float:
        return statistics.median(self.seconds[strategy][mbit])


def rows(local: LocalCluster, folder: Path) -> Mapping[str, Measure]:
    """What measures each row; the first one asked for measures all strategies."""
    ground = Ground(local, folder)
    takes: Sequence[Callable[[Ground], Row]] = (pipeline_vs_zero3, auto_vs_worst_fit, plan_vs_measured, uneven_vs_even)
    return {name: partial(take, ground) for name, take in zip(NAMES, takes, strict=True)}


def pipeline_vs_zero3(ground: Ground) -> Row:
    """A step of four stages against one of ZeRO-3, where gathering takes five times as long as computing."""
    middle = ground.rates[1]
    if "pipeline" not in ALL:
        raise CommandFailed("there is no strategy pipeline yet")
    row = compared(list(zip(ground.seconds["pipeline"][middle], ground.seconds["zero3"][middle], strict=True)))
    return row | {"parts": {"rate": f"{middle:g} Mbit/s"}}


def auto_vs_worst_fit(ground: Ground) -> Row:
    """What the plan would take against the slowest that fits, at the same rate."""
    middle = ground.rates[1]
    chosen = ground.planned(middle).chosen
    if chosen is None:
        raise CommandFailed("the plan takes nothing")
    taken = chosen.strategy if chosen.strategy in ALL else "zero0"  # of equals the plan names another than is measured
    worst = max(ALL, key=lambda each: ground.median(each, middle))
    row = compared(list(zip(ground.seconds[taken][middle], ground.seconds[worst][middle], strict=True)))
    return row | {"parts": {"taken": taken, "slowest": worst}}


def plan_vs_measured(ground: Ground) -> Row:
    """Seconds of a step, measured against planned, of every strategy at every rate; ratio: the worst of them, without
    those that are further off than CLOSE for DeepSpeed's own CPU time alone: that is no part of the plan, and on a card
    it hides behind the kernels. Says where the plan puts two strategies in another order than they were measured in."""
    parts, pairs = {"calibration": f"{ground.compute_s:.2f} s of computing a step"}, []
    alone = (f"{name} {ground.of_its_own(name):.2f}" for name in ALL)
    parts["neither computing nor network"] = f"{', '.join(alone)} s a step"
    for mbit in ground.rates:
        planned, measured = ground.predicted(mbit), {name: ground.median(name, mbit) for name in ALL}
        for name in ALL:
            own_s = ground.of_its_own(name)
            rules = not near(planned[name], measured[name]) and near(planned[name], measured[name] - own_s)
            pairs += [] if rules else [(planned[name], measured[name])]
            mark = f"; {own_s:.2f} s of it are DeepSpeed's own" if rules else ""
            told = f"planned {planned[name]:.2f} s, measured {measured[name]:.2f} s{mark}"
            parts[f"{name} at {mbit:g} Mbit/s"] = told
        without = {name: measured[name] - ground.of_its_own(name) for name in ALL}
        wrong, still = swapped(planned, measured), swapped(planned, without)
        why = "" if still else ", for DeepSpeed's own time alone"
        parts[f"order at {mbit:g} Mbit/s"] = f"swapped{why}: {wrong}" if wrong else "as measured"
    worst = max(pairs, key=lambda pair: max(pair[0] / pair[1], pair[1] / pair[0]))
    ours, peer = (round(value, 3) for value in worst)
    return {"ours": ours, "peer": peer, "ratio": round(peer / ours, 2), "unit": "s", "runs": len(pairs), "parts": parts}


def near(planned_s: float, measured_s: float) -> bool:
    return abs(measured_s / planned_s - 1) <= CLOSE


def swapped(planned: Mapping[str, float], measured: Mapping[str, float], apart: float = 1.1) -> str:
    """Pairs that the plan puts clearly in another order than they were measured in; empty where there are none."""
    wrong = [
        f"{a} before {b}"
        for a in planned
        for b in planned
        if planned[a] * apart < planned[b] and measured[a] > measured[b] * apart
    ]
    return ", ".join(wrong)


def uneven_vs_even(ground: Ground) -> Row:
    """Two hosts of which one has twice the cores: layers by their speed against as many on each, of a model whose
    layers can be shared out so."""
    if "pipeline" not in ALL:
        raise CommandFailed("there is no strategy pipeline yet")
    two, found = only(ground.local, ("te1", "te2")), {}
    ground.put(DEEPER, sum(EVEN))
    for layers in (UNEVEN, EVEN):
        told = {"model_dir": DEEPER, "strategy": "pipeline", "pipeline.layers": json.dumps(layers)}
        with ground.running(told, two) as run:
            ground.shape("--cpu", str(CPU), "--hosts", "te1")
            ground.shape("--cpu", str(OTHER_CPU), "--hosts", "te2")
            found[layers] = run.next(SETTLING + 2 * COUNTED)[SETTLING:]
    return compared(list(zip(found[UNEVEN], found[EVEN], strict=True)))


def only(local: LocalCluster, names: Sequence[str]) -> LocalCluster:
    """The same machines, but only these, as a cluster.toml that lists machines names them."""
    listed = copy.copy(local.listed())
    head, *tables = listed.toml.read_text().split("[[nodes]]")
    kept = [table for table in tables if any(f'name = "{name}"' in table for name in names)]
    listed.toml = local.folder / f"only-{'-'.join(names)}.toml"
    listed.toml.write_text("[[nodes]]".join([head, *kept]))
    listed.env = {**listed.env, "SPOTUNE_CLUSTER": str(listed.toml)}
    listed.changed()
    return listed
