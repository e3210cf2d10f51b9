"""One rank of a run whose heartbeat notices a silence after seconds: training.node.finetune, for tests.

RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/support/rank_of_run.py --run DIR
"""

from training.node import rank

LIMIT_S = 6.0


if __name__ == "__main__":
    rank.LIMIT_S = LIMIT_S
    from training.node import finetune

    finetune.main()
