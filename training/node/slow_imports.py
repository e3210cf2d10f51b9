"""For programs that import torch, transformers or DeepSpeed: Python looks for garbage less often meanwhile.

Half a million objects are made that stay, and at its usual pace the collector looks through them again and again: a
third of the seconds of such an import. Importing this module, before any other (pyproject.toml sees to that), makes the
pace slower; `all_imported` sets it back, and what is there by then is never looked at again.
"""

import gc

USUAL = gc.get_threshold()
MADE = 100_000
"""Objects made between two looks at the youngest of them; usually 700."""

gc.set_threshold(MADE, *USUAL[1:])


def all_imported() -> None:
    """The usual pace again, without what was imported. Called more than once it does no harm."""
    gc.freeze()
    gc.set_threshold(*USUAL)
