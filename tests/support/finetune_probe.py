"""One rank of a group that tests start: whole runs of training.node.finetune one after another in the same processes,
since most of a test's time goes into importing torch.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/support/finetune_probe.py JOB.json

The job names run folders; rank 0 writes how each ended beside it, into JOB.out.json. The last run goes through
`main`, which ends this process as it would end a rank's.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist

from training.node import finetune
from training.node.rank import Rank


def main():
    path = Path(sys.argv[1])
    *jobs, last = json.loads(path.read_text())
    ends = [end_of(Path(job["run"]), job.get("resume", False)) for job in jobs]
    if dist.get_rank() == 0:
        path.with_suffix(".out.json").write_text(json.dumps(ends))
    sys.argv[1:] = ["--run", last["run"]]
    finetune.main()


def end_of(run, resume):
    """The exit code, or the words of a run that diverged."""
    if resume:
        (run / "stop").unlink(missing_ok=True)
    try:
        return finetune.train(Rank(run), resume, force=False)
    except FloatingPointError as error:
        return str(error)
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    main()
