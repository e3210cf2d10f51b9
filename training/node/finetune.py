"""Fine-tune a base model: one rank of the run that a run folder describes. Read from `main` down.

    python -m training.node.finetune --run /data/runs/RUN_ID [--resume [--force]]

one per GPU, forked by training/node/supervision/fork_server.py with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set. Its exit code is one of training/text/problems.py.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from training.cost.memory import checkpoint_bytes
from training.data.collate import collate
from training.data.order import Order, micro_batches
from training.data.sample import DataError
from training.models import card
from training.models.folder import AGAIN
from training.node import checkpoint, kernels, rng, saving
from training.node.adapter.weights import first_damaged
from training.node.checkpoint import CheckpointError, TrainerState
from training.node.device import DeviceError, DeviceWatch, device
from training.node.diagnosis import on_rank
from training.node.diagnosis.on_rank import Profile
from training.node.diagnosis.progress import STEP
from training.node.measuring import Meter, evaluate, held_gib
from training.node.metrics.recorder import Recorder
from training.node.metrics.steps import CommunicationClock, StepMetrics, of_sums
from training.node.rank import Rank
from training.node.saving import Saver, Start
from training.node.strategies.registry import build_strategy
from training.node.strategies.strategy import OptimizerProgress, StepResult, Strategy
from training.node.strategies.zero import init_process_group
from training.node.work import Work, open_work, with_checkpoint_targets
from training.recipe.recipe import RecipeError
from training.recipe.tables import NF4
from training.run.causes import OF_CODE
from training.run.events import Failed, Resumed, emit
from training.run.folder import CHECKPOINTS
from training.run.history import WEIGHTS, stages_of
from training.text.counts import many
from training.text.files import TOKENIZER, model_files
from training.text.problems import FAILED, FINISHED, PEER_LOST, STOPPED, AdapterError

COLLECTIVE_TIMEOUT_S = 1800
"""Generous: a rank that is gone is noticed by the heartbeat, long before."""


def main() -> None:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint that is whole")
    parser.add_argument("--force", action="store_true", help="even if recipe, base model or data are others")
    args = parser.parse_args()
    rank = Rank(args.run.resolve())
    rank.heartbeat.start()
    on_rank.wait_for_debugger(rank)
    try:
        code = train(rank, args.resume, args.force)
    except (AdapterError, RecipeError, DataError, DeviceError) as error:
        rank.note_failure(Failed(OF_CODE[error.exit_code], str(error)))
        rank.heartbeat.fail(str(error))
        rank.leave(error.exit_code)
    except CheckpointError as error:  # the head's, and raised on every rank: Rank.rank0_broadcast
        code = error.exit_code if rank.is_head else PEER_LOST
        words = str(error) if rank.is_head else f"leaving, because of the head: {error}"
        rank.note_failure(Failed(OF_CODE[code], words, follows=not rank.is_head))
    except FloatingPointError as error:  # on every rank in the same step
        rank.note_failure(Failed("diverged", str(error)))
        code = FAILED
    except Exception as error:
        rank.give_up(error)
    rank.exit_after_barrier(code)


@dataclass
class RunProgress:
    """How far the run is; what a checkpoint remembers."""

    step: int = 0
    tokens: int = 0
    best_loss: float = float("inf")
    """Lowest validation loss of a checkpoint so far."""


@dataclass(frozen=True)
class Run:
    """Everything a step needs."""

    work: Work
    rank: Rank
    strategy: Strategy
    order: Order
    saver: Saver
    meter: Meter
    recorder: Recorder | None
    """On rank 0."""
    clock: CommunicationClock


def train(rank: Rank, resume: bool, force: bool) -> int:
    """The whole run on this rank; gives the exit code."""
    work = open_work(rank)
    recipe = work.recipe
    if recipe.base_precision == NF4:
        from training.node import nf4  # bitsandbytes is slow to import, and loads CUDA

        nf4.make_here(work.model_dir, getattr(torch, recipe.dtype))
    rank.listen_for_sigterm()
    rank.progress.enter(0, "load")
    init_process_group(rank.place.local_rank, on_rank.collective_timeout_s(rank, COLLECTIVE_TIMEOUT_S))
    same = {"recipe": recipe.compute_hash(), "base model": work.base_model, "data": work.train.content_hash}
    rank.same_everywhere(same | {"strategy": recipe.strategy, "pipeline table": recipe.pipeline.model_dump_json()})
    rank.say(
        f"{recipe.name}: {many(work.train.report.samples, 'sample')} in {many(work.train.rows, 'row')}, "
        f"{many(work.total_steps, 'step')} of {recipe.global_batch}, {many(rank.place.world_size, 'rank')}, "
        f"{recipe.strategy}"
    )
    data, base_model = work.train.content_hash, work.base_model
    keys = recipe.compute_keys()
    start = rank.rank0_broadcast(
        lambda: saving.starting_point(rank, resume, force, recipe=keys, base_model=base_model, data=data)
    )
    begun = with_checkpoint_targets(work, rank, start)
    if begun.whole.unread:
        raise RecipeError(f"{work.model_dir.name}: {begun.whole.unread}")
    work = replace(work, whole=begun.whole)
    kernels.choose_loss_and_mixers(begun.recipe, work.model_dir, rank)
    strategy = build_strategy(begun.recipe, work.model_dir, rank.place.world_size)
    rng.seed_all(recipe.seed + 1 + rank.place.rank)  # dropout: different on every rank
    progress = restore_or_begin(start, work, strategy, rank)
    with ExitStack() as at_the_end:
        run = build_run(work, rank, strategy, progress.step if start else None, at_the_end)
        return steps(run, progress)


def steps(run: Run, progress: RunProgress) -> int:
    """Step after step, with a look at the held-out rows and a checkpoint now and then."""
    work, recipe, rank = run.work, run.work.recipe, run.rank
    profile = Profile(rank, progress.step)
    stopping = False
    while progress.step < work.total_steps and not stopping:
        rank.progress.enter(progress.step, STEP)
        stopping, saving = optimizer_step(run, progress)
        profile.step()
        last = progress.step == work.total_steps
        met = stopping or saving or recipe.synchronizes(progress.step, work.total_steps)
        # Who asks a run to stop may take the machine away in a minute: first the checkpoint.
        due = last or (not stopping and met and recipe.is_due(recipe.validation.every, progress.step))
        loss, stop_requested = validate(run, progress.step) if due else (None, False)
        stopping = stopping or stop_requested
        best = recipe.keep_best and loss is not None and loss < progress.best_loss
        if best and loss is not None:
            progress.best_loss = loss
        if last or stopping or saving or best or (met and recipe.is_due(recipe.save_every, progress.step)):
            save(run, progress, loss)
    rank.progress.enter(progress.step, "save")
    profile.close()
    rank.rank0_broadcast(run.saver.finish)
    finished = progress.step == work.total_steps
    rank.say(f"{'finished' if finished else 'stopped'} after step {progress.step}")
    return FINISHED if finished else STOPPED


def build_run(work: Work, rank: Rank, strategy: Strategy, resume_step: int | None, at_the_end: ExitStack) -> Run:
    """What watches and writes down, on the rank that does; room for the checkpoints is checked before any step."""
    recipe, place = work.recipe, rank.place

    def write_config(part: Path) -> None:
        strategy.write_config(part)
        card.complete(part, rank.run_dir, recipe, work.model_dir)

    saver = Saver(
        rank.run_dir / CHECKPOINTS,
        dtype=getattr(torch, recipe.dtype),
        write_config=write_config,
        keep=recipe.keep_checkpoints,
        keep_best=recipe.keep_best,
        full=recipe.tuning == "full",
        on_saved=lambda path: rank.say(f"saved {CHECKPOINTS}/{path.name}"),
    )
    nbytes = checkpoint_bytes(work.whole.facts.trainable, saver.dtype.itemsize, recipe.sync_every > 1)
    nbytes += sum((work.model_dir / name).stat().st_size for name in model_files(work.model_dir, TOKENIZER))
    rank.rank0_broadcast(lambda: saver.check_room(nbytes))
    recorder = None
    if rank.is_head:
        recorder = Recorder(rank.run_dir, recipe, resume_step, rank.say)
        at_the_end.callback(recorder.close)
    watch = at_the_end.enter_context(DeviceWatch(device(place.local_rank)))
    clock = CommunicationClock(get_accelerator().device_name(), place.world_size)
    order = Order(work.train.rows, recipe.seed, recipe.global_batch)
    meter = Meter(work.whole.facts, recipe, work.train, watch, clock)
    return Run(work, rank, strategy, order, saver, meter, recorder, clock)


def optimizer_step(run: Run, progress: RunProgress) -> tuple[bool, bool]:
    """One step over the global batch; gives whether the ranks agreed to stop after it, and to save."""
    work, recipe, place, strategy = run.work, run.work.recipe, run.rank.place, run.strategy
    began = time.monotonic()
    numbers = run.order.step(progress.step)
    # Every rank knows every row's count, so the whole batch's needs no exchange.
    learned, tokens, counted = (
        int(each[numbers].sum()) for each in (work.train.learned, work.train.tokens, work.train.counted)
    )
    with run.clock:
        batches = [
            collate([work.train.row(n) for n in mine], work.train.report.pad_id, recipe.batching, recipe.is_dpo)
            for mine in micro_batches(numbers, strategy.replica, strategy.replicas, recipe.micro_batch)
        ]
        sums = strategy.forward_backward(batches, 1 / counted)
        lr = recipe.optimizer.lr_at(progress.step, work.total_steps)
        stepped = strategy.step(lr)
        positions = sum(batch.input_ids.numel() for batch in batches)
        own = [positions, run.rank.stop_asked(), run.rank.save_asked(), run.saver.failure() is not None]
        held = torch.zeros(place.world_size, 2, dtype=torch.float64)
        held[place.rank] = torch.tensor(held_gib())
        measured = sums.numbers
        shared = torch.cat((measured, torch.cat((torch.tensor(own), held.flatten())).to(measured)))
        dist.all_reduce(shared)
        totals, others = shared.split((len(measured), len(shared) - len(measured)))
        loss_sum, correct, *rewards = totals.tolist()
        positions, stop_votes, save_votes, failures, *held_by_ranks = others.tolist()
        progress.step += 1
        if recipe.sync_every > 1 and (stop_votes or save_votes or recipe.synchronizes(progress.step, work.total_steps)):
            run.rank.progress.enter(progress.step, "sync")  # a phase of its own: it may take as long as many steps
            strategy.synchronize()
    loss = loss_sum / counted
    progress.tokens += tokens
    if failures:
        run.rank.rank0_broadcast(run.saver.finish)  # raises what went wrong in the background, on every rank
    if has_diverged(loss, stepped):
        raise divergence_error(run, progress.step, loss, stepped.grad_norm)
    if run.recorder:
        seconds = time.monotonic() - began
        positions *= strategy.replicas / place.world_size  # each rank of a replica told all of its
        line = StepMetrics(
            step=progress.step,
            total_steps=work.total_steps,
            loss=loss,
            lr=lr,
            grad_norm=stepped.grad_norm,
            tokens=progress.tokens,
            memory_gib=round(max(held_by_ranks[::2]), 3),
            learned_tokens=learned,
            pairs=counted if recipe.is_dpo else None,
            ranks=place.world_size,
            skipped=stepped.skipped,
            memory_reserved_gib=round(max(held_by_ranks[1::2]), 3) or None,
            **of_sums(correct, rewards, counted),
            **run.meter.measured(progress.step, tokens, positions, seconds, place.world_size),
        )
        run.recorder.step(line)
        run.rank.say(line.line())
    return stop_votes > 0, save_votes > 0


def has_diverged(loss: float, stepped: StepResult) -> bool:
    """Whether nothing can come of further steps: numbers that are not finite, or a loss without any gradient, as where
    weights so large that nothing moves them are all a too high learning rate has left."""
    if not math.isfinite(loss):
        return True
    if stepped.skipped:
        return False
    return not math.isfinite(stepped.grad_norm) or (stepped.grad_norm == 0 and loss > 0)


def divergence_error(run: Run, step: int, loss: float, grad_norm: float) -> Exception:
    """What a step without usable numbers ends with. In the first one nothing was learned yet: the base is at fault."""
    recipe, base, numbers = run.work.recipe, run.work.model_dir, f"loss {loss:g}, gradient norm {grad_norm:g}"
    if step > 1:
        return FloatingPointError(
            f"the run diverged in step {step}: {numbers}; try a lower optimizer.lr than {recipe.optimizer.lr:g}"
        )
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if name := run.rank.rank0_broadcast(lambda: first_damaged(base, zeros=finite)):
        fault = "is all zeros" if finite else "holds values that are not finite"
        return RecipeError(f"{base.name}: {name} {fault}: the base model is damaged, and no setting helps; {AGAIN}")
    return FloatingPointError(
        f"step 1 failed before anything was learned: {numbers}; the base model in {recipe.dtype} or the data give such "
        "numbers, not optimizer.lr"
    )


def validate(run: Run, step: int) -> tuple[float | None, bool]:
    """The loss on the held-out rows, None where none are held out, and whether a wish to stop cut the look short; the
    same on every rank."""
    if run.work.held_out is None:
        return None, False
    seen = evaluate(run.strategy, run.work.held_out, run.work.recipe, run.rank, step)
    if seen is None:
        return None, True
    if not math.isfinite(seen.validation_loss):
        raise FloatingPointError(
            f"the run diverged: validation loss {seen.validation_loss:g} after step {step}; "
            f"try a lower optimizer.lr than {run.work.recipe.optimizer.lr:g}"
        )
    if run.recorder:
        run.recorder.evaluation(seen)
        run.rank.say(seen.line())
    return seen.validation_loss, False


def restore_or_begin(start: Start | None, work: Work, strategy: Strategy, rank: Rank) -> RunProgress:
    """Put the run back where the checkpoint left it, or begin; only the head needs to have the files."""
    if start is None:
        begin(work, strategy, rank)
        return RunProgress()
    path, state = start.path, start.state
    tensors = checkpoint.read_tensors(path) if rank.is_head else None
    rank.rank0_broadcast(lambda: saving.refuse_other_shapes(path, tensors or {}, work.whole.shapes))
    strategy.restore(tensors, saving.optimizer_progress_of(state))
    if saving.draws_go_on(state, rank.place.world_size, strategy.replicas):
        rng.restore(state.rng[rank.place.rank])
    rank.say(f"resumed from {path.name}, saved by {many(state.world_size, 'rank')}")
    if rank.is_head:
        emit(Resumed(state.step, state.world_size))
    return RunProgress(state.step, state.tokens, start.best_loss)


def begin(work: Work, strategy: Strategy, rank: Rank) -> None:
    """With what an earlier run has learned, where the head has it; else with what the strategy has drawn."""
    tensors = saving.beginning(rank.run_dir) if rank.is_head else None
    if rank.rank0_broadcast(lambda: tensors is None):
        return
    path = rank.run_dir / WEIGHTS
    rank.rank0_broadcast(lambda: saving.refuse_other_shapes(path, tensors or {}, work.whole.shapes))
    strategy.restore(tensors, OptimizerProgress(0))
    rank.say(f"begun with {', then '.join(stage.words for stage in stages_of(rank.run_dir))}")


def save(run: Run, progress: RunProgress, validation_loss: float | None) -> None:
    """Hand a checkpoint of this step to the head's background thread."""
    recipe, place = run.work.recipe, run.rank.place
    run.rank.progress.enter(progress.step, "save")
    run.rank.rank0_broadcast(run.saver.finish)  # first, so that two trainable states never lie in the head's RAM
    tensors, done = run.strategy.gather(), run.strategy.optimizer_progress()
    states: list[dict] = [{} for _ in range(place.world_size)]
    dist.all_gather_object(states, rng.capture())
    state = TrainerState(
        step=progress.step,
        tokens=progress.tokens,
        world_size=place.world_size,
        recipe=recipe.compute_keys(),
        base_model=run.work.base_model,
        data=run.work.train.content_hash,
        rng=states,
        validation_loss=validation_loss,
        updates=done.updates,
        loss_scale=done.loss_scale,
        calm=done.good_steps,
        replicas=run.strategy.replicas,
    )
    run.rank.rank0_broadcast(lambda: run.saver.save(tensors, state))


if __name__ == "__main__":
    main()
