"""Programs that tests start: `fab` and what imports torch are forked from servers (forks/) of the whole session. Ranks
that are started as on a node: training/node/test_engine.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.forks.sitecustomize import ADDRESS

ROOT = Path(__file__).parents[2]
FORKS = ROOT / "tests" / "support" / "forks"
"""In PYTHONPATH, where a program is forked or those that it starts."""
PATH = f"{FORKS}{os.pathsep}{ROOT}"
READ_AT_IMPORT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""By torch and DeepSpeed."""
ON_CARDS = READ_AT_IMPORT | {"DS_ACCELERATOR": "cuda", "FAKE_CUDA_CARDS": "1"}
"""The same on imitated cards (fake_cuda/)."""
MODULES = (
    "training.node.finetune",
    "training.node.prepare",
    "training.node.adapter.merge",
    "training.node.commcheck",
    "matplotlib.pyplot",
)
PEFT = ("peft", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto")
FAB = (
    "fabric.main",
    "deploy.tasks",
    "inventory.aliyun_ecs.sdk",
    "inventory.localcloud.tasks",
    "inventory.renting.tasks",
    "inventory.tasks",
    "snapshots.tasks",
    "tests.support.paper_ssh",
    "training.laptop.adapter.tasks",
    "training.laptop.list_tasks",
    "training.laptop.prove.tasks",
    "training.laptop.tasks",
    "training.laptop.workload",
)


def address(on_cards: bool = False) -> str:
    return os.environ[ADDRESS] + "-cards" * on_cards


def forked(code: str, *words: object, peft: bool = False) -> list[str]:
    """`python -c CODE WORDS`, forked from what has imported what ranks do; `peft`: from what has imported PEFT
    and nothing of ours, and asks no hub."""
    return [sys.executable, "-m", "forked.peft" if peft else "forked", code, *map(str, words)]


def serve() -> list[subprocess.Popen[bytes]]:
    """Starts the servers, which import nothing until they are asked, and end when their standard input is closed. From
    then on the programs of this process are forked, where they keep its environment."""
    path = filter(None, (str(FORKS), os.environ.get("PYTHONPATH")))
    os.environ |= {ADDRESS: f"spotune-tests-{os.getpid()}", "PYTHONPATH": os.pathsep.join(path)}
    return [
        _server(address(), MODULES, READ_AT_IMPORT),
        _server(address(on_cards=True), ["tests.support.fake_cuda.forked"], ON_CARDS),
        _server(f"{address()}-peft", PEFT, READ_AT_IMPORT | {"HF_HUB_OFFLINE": "1"}),
        _server(f"{address()}-fab", FAB, {"PYTHONPATH": str(ROOT)}),
    ]


def _server(name, modules, environment):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.support.forks.server", str(listener.fileno()), *modules],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
