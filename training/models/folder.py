"""A model's folder as transformers writes it: which tensor lies in which safetensors file, and the outline of its
architecture, which a process of its own counts once a config.json. No torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from training.cost.shape import ModelShape, PlanError, read_outline
from training.models.hub import HubError, file_name
from training.recipe.model_types import too_large
from training.run.checkpoint_files import FetchError, whole_tensors
from training.run.folder import LAUNCH, write_atomically
from training.text.files import ADAPTER_CONFIG, INDEX, SINGLE, STATE, model_files, object_in
from training.text.hidden import HIDDEN
from training.text.problems import AdapterError


def state_of(folder: Path) -> str:
    """Another hex digest when any file of its model was changed, by names, sizes and times."""
    stats = ((name, (folder / name).stat()) for name in model_files(folder))
    state = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return sha256(f"{folder}\n{state}".encode()).hexdigest()


def models_folder(run: Path) -> Path:
    """Where the base models of a run lie, as its launch says; beside the runs where nothing does."""
    return Path(object_in(run / LAUNCH).get("models") or run.parent.parent / "models")


NESTED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""How names begin of a text part beside others, in models of transformers 5 and in files, and how where it is alone."""
AGAIN = "copy or fetch it again"
TENSORS = "spotune-tensors.json"
"""What `described` gives, beside a config.json that lies without its weights."""
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files that hold a tokenizer's words. Without any, transformers loads one that knows no word, and says nothing."""


def shard_names(folder: Path) -> list[str]:
    """The files that a model's weights are in, in order: what is trained, merged, asked and hashed. AdapterError where
    transformers would read others, or none."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = _object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise AdapterError(f"{folder}: it is an adapter of {base!r} ({ADAPTER_CONFIG}), no model; merge the two first")
    single, index = (folder / SINGLE).is_file(), folder / INDEX
    if not single and not index.is_file():
        raise AdapterError(f"{folder}: it has no weights in safetensors files{_other_weights(folder)}")
    try:
        map_of_files = _object(index)["weight_map"] if index.is_file() else {"": SINGLE}
        names = sorted({file_name(name) for name in map_of_files.values()})
    except (HubError, LookupError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index} does not say which file holds which tensor: {error}") from None
    if single and names != [SINGLE]:
        raise AdapterError(
            f"{folder}: {SINGLE} and {INDEX} are two sets of weights, and libraries differ in which they read; delete "
            "the one that is not this model's"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        lacks = f"of its weights {missing[0]} is missing, {len(missing)} of {len(names)} files"
        raise AdapterError(f"{folder}: {lacks}; {AGAIN}")
    return names


def _other_weights(folder: Path) -> str:
    """What it has in place of weights that are read, and what to do with that; empty where it has nothing."""
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW_FOLDER')"
    pickle = f"is a pickle; transformers writes safetensors with {load}"
    known = {
        ".safetensors": f"is there, but neither {SINGLE} nor {INDEX}, which says what lies in which file; {AGAIN}",
        ".gguf": "is GGUF, made for inference; take the model that it was made from",
        **dict.fromkeys((".bin", ".pt", ".pth"), pickle),
    }
    by_suffix = {path.suffix: path.name for path in sorted(folder.glob("*"), reverse=True)}
    return next((f": {by_suffix[end]} {words}" for end, words in known.items() if end in by_suffix), "")


def refuse_no_tokenizer(folder: Path) -> None:
    """AdapterError where no file holds the tokenizer's words."""
    if not (folder / "tokenizer_config.json").is_file():
        raise AdapterError(f"{folder}: it has no tokenizer (tokenizer_config.json)")
    if not model_files(folder, TOKENIZERS):
        raise AdapterError(f"{folder}: its tokenizer has no words: there is no tokenizer.json; {AGAIN}")


def described(folder: Path) -> dict[str, list[int]]:
    """The shapes of a model's tensors by name, from the headers of its files, or from TENSORS where its weights are
    elsewhere; empty where nothing of them is there. AdapterError."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return _object(folder / TENSORS) if (folder / TENSORS).is_file() else {}
    return {tensor: entry["shape"] for name in shard_names(folder) for tensor, entry in entries(folder / name).items()}


def weight_bytes(folder: Path) -> int:
    """Size of a model's weights on disk."""
    return sum((folder / name).stat().st_size for name in shard_names(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json."""
    if not (folder / "config.json").is_file():
        raise AdapterError(f"{folder} is not a model's folder: it has no config.json")
    return _object(folder / "config.json")


def trainer_state(adapter: Path | None) -> dict[str, Any]:
    """What the checkpoint around an adapter says of its run; nothing where it is none. AdapterError for a file that
    cannot be read."""
    path = adapter.resolve().parent / STATE if adapter else None
    return _object(path) if path is not None and path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; {AGAIN}") from error


def text_name(tensor: str) -> str:
    """What a tensor of the text part is called where a model is nothing else; any other one's name as it is."""
    for begins, alone in NESTED.items():
        if tensor.startswith(begins):
            return alone + tensor.removeprefix(begins)
    return tensor


def entries(path: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and data_offsets of every tensor in a file, by name. AdapterError for one that is missing or cut."""
    try:
        return whole_tensors(path)[0]
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}; {AGAIN}") from error
    except FetchError as error:
        raise AdapterError(f"{error}; {AGAIN}") from error
    except (AttributeError, LookupError, TypeError) as error:
        raise AdapterError(f"{path} is not a safetensors file; {AGAIN}") from error


def places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the files themselves."""
    return {tensor: name for name in shard_names(folder) for tensor in entries(folder / name)}


OUTLINE = "training.node.outline"
COUNTING_S = 300.0
COUNTED_WITH = ("torch", "transformers")
CURE = "pip install -e '.[train]' (README.md says how to take the small torch, without CUDA)"
FORMAT = 4
"""Of what is kept; another one is counted anew."""
Ask = Callable[[str, Path, float], Mapping[str, Any]]
"""Runs a module of training/node that builds the model of a folder from its config.json, for so many seconds at most;
gives the JSON object that it prints last. Raises PlanError."""


def ask_here(module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """`Ask` by this Python."""
    if lacks := lacking():
        raise PlanError(f"{folder}: {lacks}: {CURE}")
    argv = [sys.executable, "-m", module, "--config", str(folder)]
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            argv, cwd=root, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"{folder.name}: {module} did not end within {limit_s:.0f} s") from error
    if done.returncode:
        raise PlanError((done.stderr.strip().splitlines() or ["no word of why"])[-1])
    outlines: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outlines


def lacking() -> str:
    """What this Python lacks to count a model, in a process of its own; empty where it has all."""
    missing = [name for name in COUNTED_WITH if name not in HIDDEN and importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"its layers are counted with {' and '.join(COUNTED_WITH)}, and this Python lacks {' and '.join(missing)}"


def shape_of(folder: Path, cache: Path, ask: Ask = ask_here) -> ModelShape:
    """The shape of the model of a folder, from `cache` if it was counted before. Raises PlanError where it cannot be
    counted, or where weights in the folder are not those that its config.json wants."""
    cache_file = cache / f"{_made_of(folder)}.json"
    try:
        return read_outline(json.loads(cache_file.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # never counted, or damaged
        if reason := too_large(object_in(folder / "config.json")):
            raise PlanError(f"{folder}: {reason}") from None
        outline: Any = next(iter(ask(OUTLINE, folder, COUNTING_S).values()), {})
    shape = read_outline(outline)
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(cache_file, json.dumps(outline))
    return shape


def _made_of(folder: Path) -> str:
    """What decides it; where this Python counts nothing, whatever library the head has."""
    try:
        config = (folder / "config.json").read_bytes()
        tensors = json.dumps(described(folder), sort_keys=True)
    except OSError as error:
        raise PlanError(f"{folder}: its config.json cannot be read: {error.strerror}") from error
    except AdapterError as error:
        raise PlanError(str(error)) from error
    library = "" if lacking() else metadata.version("transformers")
    return sha256(config + f"\n{library}\n{FORMAT}\n{tensors}".encode()).hexdigest()
