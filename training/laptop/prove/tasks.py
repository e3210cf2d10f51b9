"""fab prove."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

from inventory.command_line import sentences
from training.laptop.tasks import HERE_HELP
from training.text.counts import plain
from training.text.deferred import deferred

with deferred():
    from inventory import terminal
    from training.laptop import base_model, fetch, open_cluster, rental
    from training.laptop.prove import conduct
    from training.models import names
    from training.run import outcome

if TYPE_CHECKING:
    from training.laptop.prove.conduct import Proof


@task(
    auto_shortflags=False,
    help={
        "model": "also run three real steps of this recipe and compare them with its plan",
        "quick": "one start only: devices, network, two strategies, out of memory",
        "here": HERE_HELP,
    },
)
def prove(c: Context, model: str = "", quick: bool = False, here: bool = False) -> None:
    """Test training, failures and the network on these machines (minutes)."""
    with sentences(), open_cluster.open_cluster(here) as cluster, rental.lease_extended(cluster):
        if here:
            base_model.check_python_here()
        if model:
            names.load_recipe(model)  # an unknown one is said before anything starts
        began = time.monotonic()
        proof = conduct.prove(cluster, model, quick, _say)
        _show(proof, time.monotonic() - began)
        fetch.collect_results(cluster.head, proof.run_id)
        if proof.failures:
            raise Exit(f"{proof.failures} of {len(proof.outcomes)} failed", code=1)


def _say(text: str) -> None:
    """Beside what runs on the way say, which is not shown."""
    print(text, file=sys.stderr, flush=True)


def _show(proof: Proof, seconds: float) -> None:
    from rich.text import Text

    colours = {"pass": "green", "fail": "bold red", "not here": "yellow"}
    rows = [[Text(o.state, colours[o.state]), o.name, o.where, o.found] for o in outcome.gathered(proof.outcomes)]
    out = terminal.console()
    out.print(terminal.table(["", "what", "where", "found"], rows, {"what", "found"}))
    if made := proof.calibration:
        rates = [f"{plain(made.matmul_flops / 1e12)} TFLOP/s of {made.card}"] if made.card else []
        rates += [f"{plain(made.link_bytes_per_s / 1e9)} GB/s between ranks"] if made.link_bytes_per_s else []
        out.print(f"from now on plans go by what was measured: {', '.join(rates)}")
    counts = {state: sum(o.state == state for o in proof.outcomes) for state in colours}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    out.print(f"{summary} in {seconds / 60:.1f} min; {proof.run_id}/prove.json")


namespace = Collection(prove)
