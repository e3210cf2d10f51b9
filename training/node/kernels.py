"""Which compiled kernels a run takes: for its loss, and for layers that mix tokens otherwise than by attention. Each is
tried against what takes its place, before the model takes the memory; each rank has its own card to try.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from training.node import liger
from training.node.architecture import build, config_of
from training.node.attention import Segments
from training.node.head_check import on_a_copy
from training.node.liger import Agreement, LossChoice
from training.node.mixers import AT_ONCE, at_once, mixers, one_by_one
from training.node.rank import Rank
from training.recipe.recipe import Recipe
from training.run.folder import PLAN


def choose_loss_and_mixers(recipe: Recipe, model_dir: Path, rank: Rank) -> None:
    """Which code computes the loss and the mixers (convolutions and the like between tokens) for the rest of this
    process: faster kernels where they were seen to compute the same here."""
    dtype, device = getattr(torch, recipe.dtype), get_accelerator().current_device_name()
    if not recipe.is_dpo:  # Liger's kernels give no log-probability of each token
        choose_loss(model_dir, dtype, device, rank)
    if recipe.batching != "padded":
        _tell(rank, choose_mixers(config_of(model_dir), dtype, device))


def choose_loss(model_dir: Path, dtype: torch.dtype, device: torch.device | str, rank: Rank) -> None:
    """Our own where the plan knows it to be the faster on these cards, else Liger's where they compute the same."""
    if rank.rank0_broadcast(lambda: own_loss_is_faster(rank.run_dir)):
        rank.say(liger.leave("ours was measured as the faster on these cards").words)
        return
    _tell(rank, liger.choose(*head_shape(model_dir), dtype, device))


def _tell(rank: Rank, chosen: liger.LossChoice | LossChoice | None) -> None:
    """What is taken is said once; what one rank's card does without, by that rank."""
    if chosen and chosen.taken:
        rank.say(chosen.words)
    elif chosen:
        print(f"{rank.place}: {chosen.words}", flush=True)


def own_loss_is_faster(run: Path) -> bool:
    """What the plan of a run says; of one without a plan nobody knows."""
    try:
        plan = json.loads((run / PLAN).read_text(encoding="utf-8"))
        return plan["predicted"]["own_loss"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def head_shape(model_dir: Path) -> tuple[int | None, int | None]:
    """Width and vocabulary, whatever its configuration calls them, and of its text where it knows more than text."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False).get_text_config(
        decoder=True
    )
    return getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)


PACKAGES = ("causal_conv1d", "mamba_ssm")
"""Of which transformers takes what keeps samples apart; flash-linear-attention beside the first."""
RATES, RATE = ("A_log",), -3.0
"""What models call the logarithm of how fast a state fades."""
LENGTHS = (70, 9, 17, 5)
"""Of the samples that they are tried on: above a chunk of 64 tokens, and so short that what leaks shows."""


def choose_mixers(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> LossChoice | None:
    """Try each class of mixers of a model on a small copy, and leave to kernels those that agree, for the rest of this
    process; None where the model has no such layers, or nothing is installed or no GPU there to compute them. Before
    the model takes the memory."""
    AT_ONCE.clear()
    if torch.device(device).type == "cpu" or not any(map(importlib.util.find_spec, PACKAGES)):
        return None
    try:
        return tried(config, dtype, device)
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def tried(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> LossChoice | None:
    """`choose` on any device."""
    try:
        modules, width = small_mixers(config, dtype, device)
        apart = [agreement(module, width, dtype, device) for module in modules]
    except Exception as error:  # a kernel that does not compile fails as it likes
        return _one_by_one(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    if not modules:
        return None
    value, gradient = max(each.value for each in apart), max(each.gradient for each in apart)
    difference = f"values differ by {value:.1g}, gradients by {gradient:.1g}"
    if not all(each.within(dtype) for each in apart):
        return _one_by_one(difference)
    AT_ONCE.update((type(module), torch.device(device).type) for module in modules)
    return LossChoice(True, f"a row's samples go through the kernels of its mixers together: {difference}")


def _one_by_one(reason: str) -> LossChoice:
    return LossChoice(
        False, f"a row's samples go through its mixers one by one; together they were not kept apart: {reason}"
    )


def small_mixers(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[Sequence[nn.Module], int]:
    """One of each class, of a small copy of the model, and its width. Raises what the libraries do where none can be
    built."""

    def one_of_each(smaller: PretrainedConfig) -> tuple[Sequence[nn.Module], int]:
        modules = mixers(build(copy.deepcopy(smaller)))
        ones = [each.to(device, dtype) for each in {type(one): one for one in modules}.values()]
        return [_remembering(one) for one in ones], smaller.get_text_config().hidden_size

    cards = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        return on_a_copy(config, one_of_each)


def _remembering(module: nn.Module) -> nn.Module:
    """One whose state fades by a twentieth a token: as they begin, most forget the last token, and nothing leaks."""
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in RATES:
            nn.init.constant_(parameter, RATE)
    return module


def agreement(module: nn.Module, width: int, dtype: torch.dtype, device: torch.device | str) -> Agreement:
    """Of a row in one call and its samples one by one, on random states: relative differences of the sample that
    differs most, or of the parameters' gradients."""
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    segments = Segments(LENGTHS, edges.to(torch.int32).to(device))
    dice = torch.Generator().manual_seed(0)
    shape = (1, sum(LENGTHS), width)
    states, weight = (torch.randn(shape, generator=dice).to(device, dtype) for _ in range(2))
    values, gradients, learned = [], [], []
    for way in (at_once, one_by_one):
        module.zero_grad()
        leaf = states.clone().requires_grad_()
        out = way(module.forward, segments, leaf)
        out = out if isinstance(out, torch.Tensor) else out[0]
        (out * weight).sum().backward()
        assert leaf.grad is not None
        values.append(out.detach())
        gradients.append(leaf.grad)
        learned.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    gradient = max(_furthest(*gradients), _apart(*learned))
    return Agreement(_furthest(*values), gradient)


def _furthest(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Of (1, length, width) of the samples of a row, the one that differs most. NaN where one is."""
    samples = zip(actual.split(LENGTHS, 1), right.split(LENGTHS, 1), strict=True)
    return float(torch.tensor([_apart(one, other) for one, other in samples]).max())


def _apart(actual: torch.Tensor, right: torch.Tensor) -> float:
    return float((actual.float() - right.float()).norm() / right.float().norm())
