"""What the server that imitated ranks are forked from imports: the card, then what every rank imports."""

from tests.support.fake_cuda import loader

loader.load()

import training.node.finetune  # noqa: E402, F401
from training.node import liger  # noqa: E402

liger.leave("Triton cannot compile for an imitated card")  # where a strategy is tried without the choice before a run
