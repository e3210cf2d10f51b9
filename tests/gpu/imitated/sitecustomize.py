"""For a rehearsal: Python imports this in every process whose PYTHONPATH has this folder. It puts the imitated card of
tests/support/fake_cuda in the place of a real one, and sizes that a CPU can compute in that of `fab prove`'s."""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
exec_module = SourceFileLoader.exec_module


def imitation():
    if ROOT not in sys.path:
        sys.path.append(ROOT)
    from tests.support.fake_cuda import loader

    loader.KINDS["A10"] = ("NVIDIA H100 80GB HBM3", (9, 0), 81559)
    return loader


def small(module):
    module.SIDE["cuda"], module.COPIED["cuda"], module.VOCABULARY["cuda"] = 256, 1 << 20, 4096
    module.SUSTAINED_S["cuda"] = (0.0, 0.0)


AFTER = {
    "torch": lambda _: imitation().load(),
    "training.laptop.open_cluster": lambda module: setattr(module, "here_gpus", lambda *_, **__: ["0"]),
    "training.node.prove.devices": small,
}
"""What follows when a module has run."""


def executed(self, module):
    if self.name == "torch":
        imitation().card()  # its library is loaded first
    exec_module(self, module)
    AFTER.get(self.name, lambda _: None)(module)


SourceFileLoader.exec_module = executed
