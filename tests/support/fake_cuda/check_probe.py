"""One rank of `fab check`'s program, shorter; and of `fab prove`'s look at the kernels: on an imitated card.

RANK=0 WORLD_SIZE=2 ... python tests/support/fake_cuda/check_probe.py --run DIR
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from training.node import commcheck
from training.node.prove import devices

init, bound = dist.init_process_group, []


def noted(*args, **how):
    bound.append(how["device_id"])
    return init(*args, **how)


if __name__ == "__main__":
    dist.init_process_group = noted
    commcheck.PAIRS_BUDGET_S = commcheck.SWEEP_BUDGET_S = 0.1
    devices.VOCABULARY = {"cuda": 512}
    code = commcheck.main()
    card = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    given = {tensor.device.type for tensor in devices._given(card)}
    rows = {row.name: row.state for row in devices.check_kernels(card)[0]}
    print(f"\ngiven on {given}, bound to {bound}, {rows}", flush=True)
    sys.exit(code)
