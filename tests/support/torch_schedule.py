"""The schedule of torch.distributed.pipelining over the same stages, to hold ours against."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from training.data.collate import collate
from training.data.sample import IGNORED, Sample
from training.node.attention import Segments

ROWS, LENGTH, SCALE = 6, 40, 1 / 200


class Takes(nn.Module):
    """A stage as torch calls one: what comes in first, the rest by name."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, given, position_ids, targets):
        first = self.stage.share.is_first
        return self.stage(
            None if first else given,
            input_ids=given if first else None,
            position_ids=position_ids,
            targets=targets,
            attention_mask=None,
            segments=Segments.of(position_ids),
        )


def compare(strategy):
    """Of rows of one length: loss and flat gradient by our schedule and by torch's, of every rank."""
    starts = [(5 + row, 90 + row) for row in range(ROWS)]
    halves = [[list(range(start, start + LENGTH // 2)) for start in both] for both in starts]
    rows = [[Sample(ids, [IGNORED] * 4 + ids[4:]) for ids in both] for both in halves]
    batches = [collate([row], 0, "packed") for row in rows]
    ours = strategy.forward_backward(batches, SCALE).loss.item() * SCALE
    gradient = strategy.optimizer.gradient
    by_ours = gradient.clone()
    stage = strategy._stage
    on_torch = PipelineStage(Takes(stage), stage.share.rank, stage.share.world, torch.device("cpu"))
    schedule = Schedule1F1B(on_torch, ROWS, loss_fn=lambda out, _: out[0] * SCALE, scale_grads=False)
    ids, positions, targets = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("input_ids", "position_ids", "targets")
    )
    for _ in range(2):  # the first step learns the shapes, by a backward of its own
        gradient.zero_()
        losses = []
        given = (ids,) if stage.share.is_first else ()
        also = {"target": targets, "losses": losses} if stage.share.is_last else {}
        schedule.step(*given, position_ids=positions, targets=targets, return_outputs=False, **also)
    theirs = sum(loss.item() for loss in losses) if losses else 0.0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (ours, theirs, by_ours, gradient.clone()))
    return everyone
