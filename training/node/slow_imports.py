"""For programs that import torch, transformers or DeepSpeed: Python looks for garbage less often meanwhile.

Half a million objects are made that stay, and at its usual pace the collector looks through them again and again: a
third of the seconds of such an import. Importing this module, before any other (pyproject.toml sees to that), makes the
pace slower; `all_imported` sets it back, and what is there by then is never looked at again.

What nothing here uses is not imported at all: torch's inductor, which bitsandbytes would load, and the packages that
the environment says to hide (training/text/hidden.py).
"""

import gc
import os

from training.text.hidden import VARIABLE, hide

USUAL = gc.get_threshold()
MADE = 100_000
"""Objects made between two looks at the youngest of them; usually 700."""

gc.set_threshold(MADE, *USUAL[1:])
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def without_torch() -> None:
    """For a program that needs transformers' tokenizers alone, which do without; transformers says so in a warning."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    hide("torch")


hide(*os.environ.get(VARIABLE, "").split())


def all_imported() -> None:
    """The usual pace again, without what was imported. Called more than once it does no harm."""
    gc.freeze()
    gc.set_threshold(*USUAL)
