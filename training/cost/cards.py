"""NVIDIA's cards by the names that drivers and people give them: rates, memory, 16-bit types, kernels. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches


@dataclass(frozen=True)
class CardRates:
    """Of one kind of card."""

    peak: float
    """TFLOP/s, dense bf16 with fp32 accumulation (fp16 on T4, which has no bf16), from NVIDIA's data sheets."""
    sustained: float | None
    """TFLOP/s that LoRA training keeps up in 16 bits: published runs where there are (A100 143 to 170, 4090 102,
    3090 50; A800 as A100, of whose chip only NVLink was made slower; 5090 as 4090, by their peaks), else 0.6 of the
    measured matrix rate, or a third of the data sheet's; None where nobody knows."""
    memory_mib: int
    """As nvidia-smi counts it; of cards sold with more than one size the larger."""
    memory_gb_per_s: int
    """What reads and writes of it go by, of the data sheet; of more than one kind the larger."""


SAME_MEMORY = 0.1
"""Within which share of their memory two cards are of one kind: 24 GB are sold as 22.5 GiB."""
CARDS = {
    "H200": CardRates(989.0, 430.0, 143771, 4800),
    "B200": CardRates(2250.0, 750.0, 183359, 8000),
    "H100 NVL": CardRates(835.5, 278.0, 95830, 3938),
    "H100 PCIe": CardRates(756.0, 430.0, 81559, 2000),
    "H100": CardRates(989.0, 430.0, 81559, 3350),
    "H20": CardRates(148.0, 80.0, 97871, 4000),
    "A100": CardRates(312.0, 150.0, 81920, 2039),
    "A800": CardRates(312.0, 150.0, 81920, 2039),
    "A10G": CardRates(70.0, 42.0, 23028, 600),
    "A10": CardRates(125.0, 40.0, 23028, 600),  # the peak's boost clock is more than 150 W hold: 56 has been measured
    "A30": CardRates(165.0, None, 24576, 933),
    "A40": CardRates(149.7, None, 46068, 696),
    "A6000": CardRates(154.8, 74.0, 49140, 768),
    "L40S": CardRates(362.0, 110.0, 46068, 864),
    "L40": CardRates(181.0, None, 46068, 864),
    "L20": CardRates(119.5, 65.0, 46068, 864),
    "L4": CardRates(121.0, None, 23034, 300),
    "RTX PRO 6000": CardRates(503.8, 168.0, 97887, 1792),
    "RTX 6000 Ada": CardRates(364.2, 121.0, 49140, 960),
    "RTX 5090": CardRates(209.5, 129.0, 32607, 1792),
    "RTX 4090": CardRates(165.2, 102.0, 24564, 1008),
    "RTX 3090": CardRates(71.0, 50.0, 24576, 936),
    "T4": CardRates(65.0, 20.0, 15360, 320),
}
"""By words of the name; the first that fits counts."""
_WITHOUT_KERNELS = re.compile(r"\b(V100S?|P100|P40|P4|M60|M40|K80|GTX (9|10)\d\d|TITAN (V|X|Xp))\b", re.IGNORECASE)
"""Cards older than Turing, compute capability below 7.5: torch's wheels have nothing for them."""
_WITHOUT_BF16 = re.compile(r"\b(T4|20[678]0|GTX|TITAN RTX|Quadro RTX)\b", re.IGNORECASE)
"""Cards before NVIDIA's Ampere."""


def rates_of(card: str) -> CardRates | None:
    """Of a card by the name its driver gives it, such as `NVIDIA A10`; None for an unknown one."""
    words = f" {card} ".replace("-", " ").lower()
    return next((rates for name, rates in CARDS.items() if f" {name.lower()} " in words), None)


def same_kind(one: str | None, other: str | None) -> bool:
    """Of cards as they are named, by a driver or a person; None where ranks compute on the CPU."""
    if one is None or other is None:
        return one is other
    return one == other or rates_of(one) is rates_of(other) is not None


def peak_flops(card: str) -> float | None:
    """FLOP/s of the data sheet; None for an unknown card."""
    rates = rates_of(card)
    return rates.peak * 1e12 if rates else None


def sustained_flops(card: str) -> float | None:
    """FLOP/s that LoRA training keeps up; None where nobody knows."""
    rates = rates_of(card)
    return rates.sustained * 1e12 if rates and rates.sustained else None


def card_bytes(card: str) -> float | None:
    """What a card has: as its own name says, such as `NVIDIA A100-SXM4-40GB`, else, or where the name says nearly the
    same, by its kind; None for an unknown one."""
    rates = rates_of(card)
    usual = rates.memory_mib * 2**20 if rates else None
    if match := re.search(r"\b(\d+) ?GB\b", card):
        size = int(match[1]) * 2**30
        return size if usual is None or abs(size / usual - 1) >= SAME_MEMORY else usual
    return usual


def memory_rate(card: str) -> float | None:
    """Bytes/s of a card's memory; None for an unknown one."""
    rates = rates_of(card)
    return rates.memory_gb_per_s * 1e9 if rates else None


def at_precision(flops: float, dtype: str, gpu: bool = True) -> float:
    """A rate in 16 bits as it is in `dtype`: fp32 has a data-centre card's eighth, without tensor cores; a CPU has none
    to lose."""
    return flops / 8 if gpu and dtype == "float32" else flops


def too_old(card: str) -> bool:
    """Whether torch's wheels have no kernels for it, judged by its name alone: before a machine is rented."""
    return _WITHOUT_KERNELS.search(card) is not None


def lacks_bfloat16(card: str) -> bool:
    return _WITHOUT_BF16.search(card) is not None


def has_kernels(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether a wheel built for `archs` has code for a card: sm_80 runs on 8.6, compute_80 on all later."""
    for arch in archs:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch):
            kind, built = match[1], (int(match[2]), int(match[3]))
            same = built[0] == capability[0] and built[1] <= capability[1]
            if same or (kind == "compute" and built <= capability):
                return True
    return False


# Which kind of card somebody means who types `4090`, `A 100` or `A100-40G`.

LEAST_GB = 8
"""From which on a bare number behind a kind is its memory."""
_MEMORY = re.compile(r"(?P<kind>.*\S)[\s-]+(?P<gb>\d{1,3}) ?(?P<unit>G|GB|GIB)?", re.IGNORECASE)


def card_named(text: str) -> str | None:
    """The card, as the table of cards is asked for it: its kind, with its memory where that is not what such cards
    usually have. None for one that nothing is known of."""
    text = text.strip()
    if kind := _EXACT.get(_compact(text)):
        return kind
    if match := _MEMORY.fullmatch(text):
        kind = _EXACT.get(_compact(match["kind"])) or match["kind"]
        if card := _with_memory(kind, int(match["gb"]), bool(match["unit"])):
            return card
    return text if card_bytes(text) is not None else None


def _with_memory(kind: str, gb: int, sure: bool) -> str | None:
    """None where the number is no memory: too small a bare one, or behind a kind that is not known."""
    if not gb or not (sure or (gb >= LEAST_GB and rates_of(kind))):
        return None
    usual = card_bytes(kind)
    is_usual = usual is not None and abs(gb * 2**30 / usual - 1) < SAME_MEMORY
    return kind if is_usual else f"{kind} {gb}GB"


def unknown_card(text: str) -> str:
    """What is said of a card that nothing is known of."""
    near = get_close_matches(text.strip().upper(), CARDS, n=1)
    ask = f"did you mean {near[0]}? " if near else ""
    return f"nothing is known of it; {ask}known: {', '.join(CARDS)}"


def _compact(text: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", text.lower())


_EXACT = {_compact(name): name for name in CARDS}
_EXACT |= {_compact(name.removeprefix("RTX ")): name for name in CARDS}
"""By what is left of a name without its spaces and its maker."""


@dataclass(frozen=True)
class Rates:
    """What one card sustains and what one link carries; None where nobody knows."""

    flops: float | None
    """Of the slowest card."""
    bytes_per_s: float | None
    memory_bytes_per_s: float | None = None
    """Of the card's memory; asked for only where weights of four bits are unpacked."""
    each: tuple[float, ...] = ()
    """FLOP/s of each rank's card, in rank order, where they differ."""

    def at_precision(self, dtype: str, gpu: bool) -> Rates:
        """Of cards whose rates in 16 bits these are."""
        flops = None if self.flops is None else at_precision(self.flops, dtype, gpu)
        return replace(self, flops=flops, each=tuple(at_precision(each, dtype, gpu) for each in self.each))

    def by_stage(self, stages: int) -> tuple[float, ...] | None:
        """FLOP/s of each stage, of the slowest among the copies of the model; None where nobody knows. A copy's stages
        are ranks one after another."""
        if self.flops is None:
            return None
        return tuple(min(self.each[stage::stages], default=self.flops) for stage in range(stages))
