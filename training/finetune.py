"""Fine-tune a base model with LoRA: one rank of the run that a run folder describes. Read from `main` down.

    python -m training.finetune --run /data/runs/RUN_ID [--resume]

started once per GPU by DeepSpeed's launcher, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
set. Its exit code is one of training/exit_codes.py.
"""

from __future__ import annotations

import argparse
import resource
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoTokenizer

from training import checkpoint, metrics, rng, strategies
from training.checkpoint import CheckpointError, TrainerState
from training.data import DataError, Order, Sample, check_file, collate, micro_batches, tokenize
from training.exit_codes import FAILED, FINISHED, PEER_LOST, STOPPED, UNUSABLE
from training.loss import scaled_for_mean, token_loss_sum
from training.rank import Rank, lost_peer
from training.recipe import Recipe, RecipeError, read_recipe
from training.strategies import Strategy
from training.strategies.zero3 import init_process_group

COLLECTIVE_TIMEOUT_S = 1800
"""Generous: a rank that is gone is noticed by the heartbeat, long before."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint that is whole")
    args = parser.parse_args()
    rank = Rank(args.run.resolve())
    rank.heartbeat.start()
    try:
        code = train(rank, args.resume)
    except (RecipeError, DataError) as error:
        rank.note_failure(str(error))
        rank.heartbeat.fail(str(error))
        rank.leave(UNUSABLE)
    except CheckpointError as error:  # the head's, and raised on every rank: Rank.on_head
        rank.note_failure(str(error) if rank.is_head else f"leaving, because of the head: {error}")
        code = error.exit_code if rank.is_head else PEER_LOST
    except Exception as error:
        reason = "lost contact with another rank" if lost_peer(error) else f"{type(error).__name__}: {error}"
        rank.note_failure(f"{traceback.format_exc()}{reason}")
        rank.heartbeat.fail(reason.splitlines()[0])
        rank.leave(PEER_LOST if lost_peer(error) else FAILED)
    rank.leave_together(code)


@dataclass(frozen=True)
class Work:
    """What to train on, as every rank knows it before any of them talks to another."""

    recipe: Recipe
    model_dir: Path
    samples: list[Sample]
    left_out: int
    pad_id: int
    base_model: str
    """Hash of the base model's files."""
    data: str
    """sha256 of the data file."""

    @property
    def total_steps(self) -> int:
        return self.recipe.total_steps(len(self.samples))


@dataclass
class Progress:
    """How far the run is; what a checkpoint remembers."""

    step: int = 0
    tokens: int = 0


def train(rank: Rank, resume: bool) -> int:
    """The whole run on this rank; gives the exit code."""
    work = prepare(rank)
    recipe = work.recipe
    rank.listen_for_sigterm()
    init_process_group(rank.place.local_rank, COLLECTIVE_TIMEOUT_S)
    rank.same_everywhere({"recipe": recipe.maths_hash(), "base model": work.base_model, "data file": work.data})
    rank.say(
        f"{recipe.name}: {len(work.samples)} records ({work.left_out} without anything to learn left out), "
        f"{work.total_steps} steps of {recipe.global_batch}, {rank.place.world_size} ranks, {recipe.strategy}"
    )
    start = rank.on_head(lambda: starting_point(rank, work, resume))
    strategy = strategies.build(recipe, work.model_dir, rank.place.world_size)
    rng.seed_all(recipe.seed + 1 + rank.place.rank)  # dropout: different on every rank
    progress = restore(start, strategy, rank)

    order = Order(len(work.samples), recipe.seed, recipe.global_batch)
    stopping = False
    while progress.step < work.total_steps and not stopping:
        stopping = optimizer_step(progress, order, work, strategy, rank)
        last = stopping or progress.step == work.total_steps
        if last or progress.step % recipe.save_every == 0:
            save(progress, work, strategy, rank)
    finished = progress.step == work.total_steps
    rank.say(f"{'finished' if finished else 'stopped'} after step {progress.step}")
    return FINISHED if finished else STOPPED


def prepare(rank: Rank) -> Work:
    """Read, check and tokenise: what may take minutes stays outside any collective's time-out."""
    recipe = read_recipe(rank.run / "recipe.toml")
    models = Path(rank.launch.get("models") or rank.run.parent.parent / "models")
    model_dir = models / recipe.model_dir
    if not (model_dir / "config.json").is_file():
        raise RecipeError(f"no base model at {model_dir}")
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    data = rank.run / "data" / "train.jsonl"
    summary = check_file(data)
    samples, left_out = tokenize(data, tokenizer, recipe.max_length)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    base_model = checkpoint.base_model_hash(model_dir)
    return Work(recipe, model_dir, samples, left_out, pad_id, base_model, summary.sha256)


def optimizer_step(progress: Progress, order: Order, work: Work, strategy: Strategy, rank: Rank) -> bool:
    """One step over the global batch; gives whether the ranks agreed to stop after it."""
    recipe, place = work.recipe, rank.place
    began = time.monotonic()
    device = get_accelerator().current_device_name()
    batch = order.step(progress.step)
    # Every rank knows every record's length, so the whole batch's token count needs no exchange.
    learned = sum(work.samples[number].learned for number in batch)
    loss_sum = torch.zeros((), device=device)
    for numbers in micro_batches(batch, place.rank, place.world_size, recipe.micro_batch):
        inputs = collate([work.samples[number] for number in numbers], work.pad_id)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        part = token_loss_sum(strategy.forward(inputs["input_ids"], inputs["attention_mask"]), inputs["labels"])
        strategy.backward(scaled_for_mean(part, learned, place.world_size))
        loss_sum += part.detach()
    lr = recipe.optimizer.lr_at(progress.step, work.total_steps)
    grad_norm = strategy.step(lr)

    shared = torch.tensor([loss_sum.item(), float(rank.stop_asked())], dtype=torch.float64, device=device)
    dist.all_reduce(shared)
    loss, stop_votes = shared[0].item() / learned, shared[1].item()
    progress.step += 1
    if not (torch.isfinite(shared[0]) and grad_norm < float("inf")):
        raise FloatingPointError(
            f"step {progress.step}: loss {loss}, gradient norm {grad_norm}; try a lower optimizer.lr"
        )
    tokens = sum(len(work.samples[number].ids) for number in batch)
    progress.tokens += tokens
    if rank.is_head:
        step_s = time.monotonic() - began
        line = metrics.StepMetrics(
            step=progress.step,
            total_steps=work.total_steps,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=progress.tokens,
            tokens_per_s=round(tokens / step_s, 1),
            samples=progress.step * recipe.global_batch,
            epoch=round(progress.step * recipe.global_batch / len(work.samples), 4),
            memory_gib=round(memory_gib(), 3),
            step_s=round(step_s, 4),
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        metrics.append(rank.run / "metrics.jsonl", line)
        rank.say(line.line())
    return stop_votes > 0


def memory_gib() -> float:
    """Most this process has held: on the GPU, or resident where there is none."""
    if get_accelerator().device_name() == "cuda":
        return get_accelerator().max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def starting_point(rank: Rank, work: Work, resume: bool) -> tuple[Path, TrainerState] | None:
    """On rank 0: the checkpoint to go on from, checked to belong to this run; None to begin anew."""
    folder = rank.run / "checkpoints"
    if not resume:
        if checkpoint.steps(folder):
            raise CheckpointError(f"{folder} holds checkpoints of an earlier start; resume it, or start a new run")
        metrics.keep_until(rank.run / "metrics.jsonl", 0)
        return None
    path, damaged = checkpoint.newest_valid(folder)
    for bad in damaged:
        rank.say(f"{bad.name} is not used: {'; '.join(checkpoint.faults(bad))}")
    if path is None:
        raise CheckpointError(f"no whole checkpoint in {folder}")
    state = checkpoint.read_state(path)
    checkpoint.refuse_other(path, state, work.recipe.maths(), work.base_model, work.data)
    checkpoint.set_aside_after(folder, state.step)
    metrics.keep_until(rank.run / "metrics.jsonl", state.step)
    return path, state


def restore(start: tuple[Path, TrainerState] | None, strategy: Strategy, rank: Rank) -> Progress:
    """Put the run back where the checkpoint left it; only the head needs to have the files."""
    if start is None:
        return Progress()
    path, state = start
    strategy.restore(checkpoint.read_tensors(path) if rank.is_head else None, state.step)
    if state.world_size == rank.place.world_size:
        rng.restore(state.rng[rank.place.rank])
    rank.say(f"resumed from {path.name}, saved by {state.world_size} ranks")
    return Progress(state.step, state.tokens)


def save(progress: Progress, work: Work, strategy: Strategy, rank: Rank) -> None:
    """Write a checkpoint of this step on the head."""
    recipe, place = work.recipe, rank.place
    tensors = strategy.gather()
    states: list[dict] = [{} for _ in range(place.world_size)]
    dist.all_gather_object(states, rng.capture())
    state = TrainerState(
        step=progress.step,
        samples=progress.step * recipe.global_batch,
        tokens=progress.tokens,
        world_size=place.world_size,
        recipe=recipe.maths(),
        recipe_hash=recipe.maths_hash(),
        base_model=work.base_model,
        data=work.data,
        rng=states,
    )
    folder = rank.run / "checkpoints"
    dtype = getattr(torch, recipe.dtype)

    def write() -> str:
        assert tensors is not None
        config = strategy.adapter_config.save_pretrained
        return checkpoint.save(
            folder, tensors, state, dtype=dtype, write_adapter_config=config, keep=recipe.keep_checkpoints
        ).name

    rank.say(f"saved checkpoints/{rank.on_head(write)}")


if __name__ == "__main__":
    main()
