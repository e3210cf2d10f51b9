"""One start, many questions: every rank's device, the network, the kernels, every strategy; then out of memory.

    python -m training.node.prove.walk --run DIR

started once per rank, as training is. asked.json in the run folder says how much. Rank 0 writes result.json
after each outcome, so that an end before the last one costs those after it only. In the end of all the last rank asks
for more memory than there is: the verdict must name it.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.cost.strategies import STRATEGIES
from training.node import commcheck, liger
from training.node.device import device
from training.node.diagnosis.progress import STEP
from training.node.prove import curve, devices
from training.node.rank import Rank
from training.node.strategies.zero import init_process_group
from training.run import comm_report
from training.run.folder import RESULT, write_atomically
from training.run.outcome import Outcome, as_rows, failed, judged
from training.text.problems import FINISHED

ASKED = "asked.json"
TIMEOUT_S = 180
QUICK_STAGES = ("zero0", "zero3")
QUICK_BUDGET_S = 1.0


def main() -> None:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    rank = Rank(parser.parse_args().run.resolve())
    rank.heartbeat.start()
    try:
        Walk(rank).whole()
        run_out_of_memory(rank)
    except Exception as error:
        rank.give_up(error)
    rank.exit_after_barrier(FINISHED)


class Walk:
    """The parts one after another, all ranks together."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.quick: bool = json.loads((rank.run_dir / ASKED).read_text(encoding="utf-8"))["quick"]
        self.found: dict[str, Any] = {"run_id": rank.run_dir.name, "outcomes": [], "done": False}

    def whole(self) -> None:
        """Everything but the end."""
        init_process_group(self.rank.place.local_rank, TIMEOUT_S)
        self.on = device(self.rank.place.local_rank)
        parts: list[Callable[[], Iterable[Outcome]]] = [self.devices, self.network, self.strategies]
        for number, part in enumerate(parts):
            self.rank.progress.enter(number, STEP)
            self.rank.say(f"{part.__name__} ...")
            for outcome in part():
                self.found["outcomes"] += as_rows([outcome])
                self._write()
            self.found["done"] = part == parts[-1]
            self._write()
        dist.barrier()

    def _write(self) -> None:
        if self.rank.is_head:
            write_atomically(self.rank.run_dir / RESULT, json.dumps(self.found, indent=1) + "\n")

    def devices(self) -> list[Outcome]:
        """What each rank's device does, and whether its kernels are right."""
        outcomes, rates = devices.measure_device(self.on)
        right, seconds = devices.check_kernels(self.on)
        outcomes += right
        rates |= seconds
        mine = (str(self.rank.place), as_rows(outcomes), rates)
        everyone: list[Any] = [None] * self.rank.place.world_size
        dist.all_gather_object(everyone, mine)
        self.found["rates"] = [rates for _, _, rates in everyone]
        return [Outcome(**{**row, "where": where}) for where, rows, _ in everyone for row in rows]

    def network(self) -> list[Outcome]:
        """What `fab check` does."""
        place = self.rank.place
        backend = "nccl" if self.on.type == "cuda" else "gloo"
        group = commcheck.Group(place.rank, place.world_size, self.on, backend)
        share = QUICK_BUDGET_S / commcheck.SWEEP_BUDGET_S if self.quick else 0.5
        result = commcheck.measure(group, share)
        self.found["comm"] = result
        hints = comm_report.problems(result)
        strays = [n for n in result["nodes"] if set(n["interfaces_used"]) - {n["interface_expected"], "lo"}]
        rates = {name: comm_report.best_busbw(result, name) for name in ("all_gather", "all_reduce")}
        speed = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
        slowest = comm_report.slowest_pair(result)
        pair = f"; slowest {slowest['from']} -> {slowest['to']} {slowest['gbit_s']:.2f} Gbit/s" if slowest else ""
        wrong = comm_report.wrong_results(result)
        kinds = sorted({check["dtype"] for check in result["checks"]})
        lines = [f"{len(result['checks']) // len(kinds)} operations in {', '.join(kinds)}"]
        if wrong:
            lines = comm_report.check_lines({**result, "checks": [c for c in result["checks"] if not c["ok"]]})
        return [
            judged("collectives are right", not wrong, "; ".join(lines)),
            judged("network", not any(n["interface_expected"] for n in strays), "; ".join([f"{speed}{pair}", *hints])),
        ]

    def strategies(self) -> Iterator[Outcome]:
        """Every strategy, with and without checkpointing, against the stored curve; with the loss that training would
        choose."""
        if chosen := liger.choose(curve.WIDTH, curve.VOCABULARY, torch.float32, self.on):
            yield judged("kernels of the loss", chosen.taken, chosen.words)
        stages = QUICK_STAGES if self.quick else tuple(STRATEGIES)
        cases = [(stage, again) for stage in stages for again in ((True,) if self.quick else (True, False))]
        with tempfile.TemporaryDirectory() as folder:
            curve.write_model(Path(folder))
            for number, (stage, again) in enumerate(cases):
                self.rank.progress.enter(10 + number, STEP)
                name = f"{stage}{' with checkpointing' if again else ''}"
                yield self.strategy(name, stage, again, Path(folder))

    def strategy(self, name: str, stage: str, again: bool, model_dir: Path) -> Outcome:
        began, problem = time.monotonic(), ""
        try:
            seen = curve.walk(curve.recipe_of(stage, again, self.rank.place.world_size), model_dir)
        except Exception as error:  # on every rank alike; where it is on one alone the others' collective ends the walk
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"{name}: {traceback.format_exc()}", flush=True)
        errors: list[Any] = [None] * self.rank.place.world_size
        dist.all_gather_object(errors, problem)
        if any(errors):
            return failed(name, next(filter(None, errors)))
        off = seen.apart(curve.stored())
        words = f"off the stored curve by {off:.1e} in {curve.STEPS} steps ({time.monotonic() - began:.1f} s)"
        return judged(name, off < curve.TOLERANCE[self.on.type], words)


def run_out_of_memory(rank: Rank) -> None:
    """The last rank asks for what nobody has; the others wait for it, as they do in training."""
    rank.say("the last rank now runs out of memory, on purpose")
    if rank.place.rank == rank.place.world_size - 1:
        on = device(rank.place.local_rank)
        most = 2 * torch.cuda.mem_get_info(on)[1] if on.type == "cuda" else 1 << 50
        torch.empty(most, dtype=torch.uint8, device=on)
    dist.barrier()


if __name__ == "__main__":
    main()
