"""Look into data before anything is trained on them, on the head: what `fab data` shows.

    python -m training.node.look --run DIR [--show 3] [--skip-bad]

reads recipe.toml and data/ of a folder like a run's, and the base model's tokenizer. Tells its progress and, last,
the look, one line of JSON each. It ends with its standard input.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported, without_torch

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from training.data.survey import survey
from training.models.folder import models_folder, read_config
from training.node import attached
from training.node.prepare import raw_data
from training.recipe.reading import read_recipe
from training.run.folder import RECIPE

TELL_EVERY_S = 0.5


class Progress:
    """Tells whoever asked how far it is, not oftener than is looked at."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, records: int) -> None:
        if time.monotonic() - self._last >= TELL_EVERY_S:
            self._last = time.monotonic()
            attached.tell(doing=what, records=records)


def work(run: Path, show: int, skip_bad: bool) -> None:
    """The look at the data in a run's folder, told."""
    from training.data.look.take import LookWish, load_tokenizer, look_into

    tell = Progress()
    recipe, models = read_recipe(run / RECIPE), models_folder(run)
    model_dir = models / recipe.model_dir
    config, tokenizer = read_config(model_dir), load_tokenizer(model_dir)
    all_imported()
    data = raw_data(run / "data", models.parent / "cache" / "datasets")
    data_survey = survey(data, tell)
    look = look_into(data, data_survey, recipe, tokenizer, config, wish=LookWish(show, skip_bad, tell))
    attached.tell(look=asdict(look))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a folder like a run's")
    parser.add_argument("--show", type=int, default=3, help="records whose samples are shown (default 3)")
    parser.add_argument("--skip-bad", action="store_true", help="look at the rest as if bad records were left out")
    args = parser.parse_args()
    attached.end_with_input()
    without_torch()
    return attached.run(lambda: work(args.run.resolve(), args.show, args.skip_bad), attached=True)


if __name__ == "__main__":
    sys.exit(main())
