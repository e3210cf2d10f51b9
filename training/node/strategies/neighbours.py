"""Who stands where in a pipeline with replicas, and the groups in which ranks talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup


@dataclass(frozen=True)
class Link:
    """Between a stage and the next one: each direction in a group of its own, so that neither waits for the other."""

    before: int
    """Rank of the earlier stage."""
    after: int
    activations: Group
    gradients: Group

    def open(self, rank: int, device: torch.device) -> None:
        """Something small both ways: NCCL connects two ranks at their first exchange, while both do nothing else."""
        token = torch.zeros(1, device=device)
        for source, target, group in (
            (self.before, self.after, self.activations),
            (self.after, self.before, self.gradients),
        ):
            if rank == source:
                dist.send(token, target, group)
            elif rank == target:
                dist.recv(token, source, group)


@dataclass(frozen=True)
class Neighbours:
    """Who stands where. The stages of a replica are ranks in a row: neighbours share a machine where it has several
    cards, replicas meet but once a step."""

    stage: int
    replica: int
    previous: Link | None
    next: Link | None
    same_stage: Group | None
    """Who holds the same layers in the other replicas; None where all ranks do."""
    same_replica: Group | None
    """Who holds the rest of this replica; None where this rank is all of it."""

    @classmethod
    def meet(cls, stages: int, device: torch.device) -> Neighbours:
        """All ranks together: every group is made on every rank, in one order."""
        rank, replicas = dist.get_rank(), dist.get_world_size() // stages
        rows = [range(replica * stages, (replica + 1) * stages) for replica in range(replicas)]
        links = [
            Link(row[s], row[s + 1], dist.new_group([row[s], row[s + 1]]), dist.new_group([row[s], row[s + 1]]))
            for row in rows
            for s in range(stages - 1)
        ]
        if stages > 1:
            columns = [dist.new_group([row[s] for row in rows]) for s in range(stages)]
            whole = [dist.new_group(list(row)) for row in rows]
        replica, stage = divmod(rank, stages)
        for odd in (0, 1):  # every second link, then the others: none waits for its neighbour's
            for link in links:
                if link.before % stages % 2 == odd:
                    link.open(rank, device)
        return cls(
            stage=stage,
            replica=replica,
            previous=next((link for link in links if link.after == rank), None),
            next=next((link for link in links if link.before == rank), None),
            same_stage=columns[stage] if stages > 1 else None,
            same_replica=whole[replica] if stages > 1 else None,
        )
