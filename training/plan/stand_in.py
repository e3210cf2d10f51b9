"""What is not known of machines: a rate for each that nobody knows, to choose by and not to show, with the words that
say so. `fab plan` alone shows figures that rest on a network it takes for so fast. Pure."""

from __future__ import annotations

from dataclasses import replace

from training.cost.pace import LINE_SHARE, Rates
from training.plan.machines import PlannedMachines

CARD_FLOPS, CARD_MEMORY = 40e12, 600e9
"""An A10's."""
CPU_FLOPS = 1e11
"""Of some cores."""
GBIT_S = 16
LINK = LINE_SHARE * GBIT_S / 8 * 1e9
NETWORK = (
    f"taking the network for {GBIT_S} Gbit/s: fab check measures it, line_rate_gbps in cluster.toml says it, "
    f"or fab plan --line-rate-gbps {GBIT_S}"
)
TAKEN = f"taken for {GBIT_S} Gbit/s"
"""Where a link that nobody knows is known from."""


def stood_in(machines: PlannedMachines) -> Rates:
    """The machines' rates with nothing left open."""
    known = machines.rates
    return replace(
        known,
        flops=known.flops or _flops(machines),
        bytes_per_s=known.bytes_per_s or LINK,
        memory_bytes_per_s=known.memory_bytes_per_s or CARD_MEMORY,
    )


def _flops(machines: PlannedMachines) -> float:
    return CARD_FLOPS if machines.card else CPU_FLOPS


def assumed(machines: PlannedMachines) -> str:
    """What a choice rests on that nobody knows, and how to know it: the end of a sentence."""
    said = []
    if machines.rates.flops is None:
        what = "a card" if machines.card else "a CPU"
        said.append(f"taking {what} for {_flops(machines) / 1e12:g} TFLOP/s: fab prove measures it")
    if machines.rates.bytes_per_s is None and machines.ranks > 1:
        said.append(NETWORK)
    return "; ".join(said)


def with_network(machines: PlannedMachines) -> PlannedMachines:
    """With the network stood in for where it alone is not known: all figures then rest on it, as `link_from` says."""
    rates = machines.rates
    if machines.ranks == 1 or rates.flops is None or rates.bytes_per_s is not None:
        return machines
    return replace(machines, rates=replace(rates, bytes_per_s=LINK), link_from=TAKEN)
