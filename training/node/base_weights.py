"""Whether the weights in a model's files are those that its config.json wants, by their headers alone.

transformers draws what the files lack at random, and says so in a log alone. Here it loads the model as it always does,
with its own renamings and conversions, but on the meta device: names and shapes, no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from training.models.folder import described
from training.node import architecture
from training.node.adapter.weights import first_hole, pieces_of
from training.text.problems import AdapterError


def check_weights_match_config(folder: Path) -> None:
    """AdapterError where the files in `folder` lack a tensor of the model, hold one of another shape, or one of the
    text part that the model has not; nothing for a folder without weights."""
    if not (shapes := described(folder)):
        return
    config = architecture.config_of(folder)
    try:
        model, loading_info = _read(config, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        with torch.device("meta"):
            whole = architecture.build(config)
        hole = first_hole(pieces_of(whole, shapes), {name: p.shape for name, p in whole.named_parameters()})
        reason = f"the parts of {hole} are not all there, or of other shapes" if hole else " ".join(str(error).split())
        raise AdapterError(f"{folder}: its weights are not read as a {config.model_type}'s: {reason}") from error
    problems = []
    if missing := sorted(loading_info["missing_keys"]):
        problems.append(f"lack {_some(missing)}, which would be drawn at random")
    for name, stored, wanted in sorted(loading_info["mismatched_keys"])[:1]:
        problems.append(f"hold {name} as {tuple(stored)}, and not as {tuple(wanted)}")
    if beyond := sorted(_of_the_text(model, loading_info["unexpected_keys"])):
        problems.append(f"hold {_some(beyond)}, which would be left out")
    if other := getattr(config, "transformers_weights", None):
        problems.append(f"are not {other}, which it names as transformers_weights")
    if problems:
        raise AdapterError(
            f"{folder}: config.json and weights are not of one model: the files {'; they '.join(problems)}"
        )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _read(config: Any, tensors: dict[str, torch.Tensor]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Without transformers' bar and its report."""
    built: Any = architecture.auto_class(config)._model_mapping[type(config)]
    how = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]]
        loaded = built.from_pretrained(None, config=config, state_dict=tensors, **how)
        return loaded
    finally:
        logging.set_verbosity(verbosity)


def _of_the_text(model: PreTrainedModel, tensors: Iterable[str]) -> Iterator[str]:
    """Those that would lie in a layer, the embedding, the norm or the head, or among the layers. What guesses several
    tokens at once lies behind the last layer, and is not trained."""
    known, text = dict(model.named_modules()), architecture.text_modules(model)
    guesses = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    behind = [str(len(architecture.text_layers(model)) + number) for number in range(guesses)]
    for tensor in tensors:
        owner = tensor
        while owner not in known:
            owner = owner.rpartition(".")[0]
        number = tensor.removeprefix(f"{owner}.").partition(".")[0]
        is_guess = number in behind and isinstance(known[owner], torch.nn.ModuleList)
        if owner in text and known[owner] is not architecture.text_part(model) and not is_guess:
            yield tensor
