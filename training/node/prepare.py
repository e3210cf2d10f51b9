"""Prepare a run's data before any rank starts, on the head.

    python -m training.node.prepare --run /data/runs/RUN_ID [--skip-bad]

reads recipe.toml and data/ of the run folder and the tokenizer of the base model; makes data/prepared/train and,
where the recipe keeps some records for validation, data/prepared/validation, from a cache if they were made
before. Writes data/report.json and prints the same, one line of JSON, last. Exit code 2 where the data cannot be
trained on, with the reasons on stderr, or with --attached as `mistake`.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported, without_torch

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.cost.shape import ModelShape
from training.data import hub, limits
from training.data.build import TRAIN, VALIDATION, cached, link, pad_id, whole
from training.data.encode import Encoder
from training.data.file_names import NAMES, called_by_user
from training.data.look.take import load_tokenizer
from training.data.prepared import open_prepared
from training.data.sample import CURE, Bad, DataError
from training.data.source import Data, data_of, downloaded
from training.models.folder import models_folder, read_config, shape_of
from training.node import attached
from training.node.answered import Answered
from training.recipe.reading import read_recipe
from training.recipe.recipe import Recipe
from training.run.folder import RECIPE
from training.text.files import GENERATION, drop_unused, mark_used, object_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad records out instead of stopping")
    parser.add_argument("--attached", action="store_true", help="JSON lines, and end with standard input")
    args = parser.parse_args()
    if args.attached:
        attached.end_with_input()

    def work() -> None:
        run = args.run.resolve()
        if not names_modules(read_recipe(run / RECIPE)):
            without_torch()
        attached.tell(**prepare(run, args.skip_bad))

    sys.exit(attached.run(work, args.attached))


def names_modules(recipe: Recipe) -> bool:
    """Whether a recipe names modules of its model, so that only the whole model says whether they are there."""
    return recipe.tuning == "lora" and bool(recipe.lora.named_targets or recipe.lora.modules_to_save)


def prepare(run: Path, skip_bad: bool) -> dict[str, Any]:
    """The whole preparation; gives what there is to say about data, model and disk."""
    recipe, models = read_recipe(run / RECIPE), models_folder(run)
    cache, model_dir = models.parent / "cache", models / recipe.model_dir
    read_config(model_dir)  # a model that is not there is said before data are downloaded
    data = raw_data(run / "data", cache / "datasets")
    asked = Answered(cache / "answers", recipe, model_dir, data, skip_bad)
    answer = asked.read()
    if answer and whole(entry := cache / "prepared" / answer["report"]["content_hash"], recipe, skip_bad):
        mark_used(entry)
    else:
        answer, entry = _prepare(recipe, model_dir, data, skip_bad, cache)
        asked.keep(answer)
    link(entry, run / "data" / "prepared")
    answer |= {"disk_free_gib": round(shutil.disk_usage(run).free / 2**30, 1)}
    (run / "data" / "report.json").write_text(json.dumps(answer, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return answer


def _prepare(recipe: Recipe, model_dir: Path, data: Data, skip_bad: bool, cache: Path) -> tuple[dict[str, Any], Path]:
    """What there is to say about data and model, and the data's entry in the cache. The model is counted meanwhile."""
    from training.node.known_outline import known_outline  # it imports transformers

    known = known_outline(read_config(model_dir))

    def shape() -> ModelShape:
        return known or shape_of(model_dir, cache / "outlines")

    with ThreadPoolExecutor(1) as pool:  # which waits for a program and imports nothing: this process may fork
        counted = pool.submit(shape)
        answer, entry = _prepare_data(recipe, model_dir, data, skip_bad, cache)
        answer |= {"outline": counted.result().to_outline()}
    if names_modules(recipe):
        from training.node.model import whole_model  # here: DeepSpeed takes seconds, and most recipes name no module

        whole_model(recipe, model_dir)  # refuses what it does not have
    return answer, entry


def _prepare_data(
    recipe: Recipe, model_dir: Path, data: Data, skip_bad: bool, cache: Path
) -> tuple[dict[str, Any], Path]:
    config = read_config(model_dir)
    tokenizer = load_tokenizer(model_dir)
    all_imported()
    encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on, recipe.template_args)
    limits.check_settings(config, recipe, tokenizer, pad_id(tokenizer, recipe), encoder.end_id)
    bad = Bad(skip_bad, cure=CURE)
    entry = cached(data, encoder, recipe, cache=cache / "prepared", bad=bad)
    parts = (TRAIN, VALIDATION) if recipe.validation.fraction else (TRAIN,)
    made = {part: open_prepared(entry / part) for part in parts}
    limits.check_ids(config, recipe, tokenizer, max(one.largest_id for one in made.values()))
    reports = {part: asdict(one.report) for part, one in made.items()}
    answer = {
        "report": reports[TRAIN],
        "validation": reports.get(VALIDATION),
        "skipped": bad.shown,
        "model": config,
        "generation": object_in(model_dir / GENERATION),
    }
    return answer, entry


def raw_data(folder: Path, downloads: Path) -> Data:
    """The run's data as the user gave and calls them: data/train.SUFFIX or the folder data/train. A train.hub holds the
    name of a data set of the Hub, which is downloaded."""
    candidates = sorted(path for path in folder.glob("train*") if path.stem == "train")
    if len(candidates) != 1:
        raise DataError(f"{folder} should hold one train file or folder, and holds {len(candidates)}")
    if candidates[0].suffix == hub.POINTER:
        dataset = hub.HubDataSet.parse(candidates[0].read_text(encoding="utf-8").strip())
        root = hub.download(dataset, downloads)
        mark_used(root)
        drop_unused(downloads.glob("*/*"))
        return downloaded(dataset, root)
    return data_of(candidates[0], called_by_user(folder, folder / NAMES))


if __name__ == "__main__":
    main()
