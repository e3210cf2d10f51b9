"""A rank of ZeRO-3's proof whose second rank forgets its samples."""

from __future__ import annotations

from training.node import zero3_rank
from training.node.strategies.zero import Zero

learn = Zero.learn


def forgetful(strategy, batches, scale):
    return learn(strategy, batches, scale if strategy.replica == 0 else 0.0)


if __name__ == "__main__":
    Zero.learn = forgetful
    zero3_rank.main()
