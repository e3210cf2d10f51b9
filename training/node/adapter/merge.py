"""Merge an adapter into its base model: file by file, on the CPU, in fp32, holding one tensor at a time.

    python -m training.node.adapter.merge --model /data/models/NAME --adapter DIR/adapter --to DIR

The result is a plain transformers folder with the base's files, dtypes and tokenizer, sealed by SHA256SUMS.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from training.models.folder import (
    entries,
    places,
    read_config,
    shard_names,
    text_name,
    trainer_state,
    weight_bytes,
)
from training.node import attached
from training.node.adapter.decoding import name_end_of_turn
from training.node.adapter.weights import Adapter, Experts, refuse_damaged
from training.node.base_weights import check_weights_match_config
from training.node.checkpoint import base_model_hash
from training.recipe.model_types import text_settings
from training.text.counts import size_text
from training.text.files import (
    ADAPTER_WEIGHTS,
    INDEX,
    LICENCE,
    ORIGIN,
    SMALL,
    SUMS,
    copy_files,
    parse_sums,
    read_origin,
    seal_model,
    sha256_of,
)
from training.text.problems import AdapterError

ROOM_TO_SPARE = 256 * 2**20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Merged:
    """What lies there now."""

    folder: Path
    nbytes: int
    files: int
    already: bool = False
    """It was merged before, and nothing was written."""


@dataclass(frozen=True)
class TensorChange:
    """What an adapter makes of the tensors of a model's files."""

    adapter: Adapter
    experts: Experts | None

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """In fp32; None where it leaves a tensor as it is."""
        if (own := text_name(name)) in self.adapter.parts:
            return self.adapter.merged(own, tensor)
        return self.experts.merged(name, tensor) if self.experts and name in self.experts.pieces else None


def merge(model_dir: Path, adapter_dir: Path, target: Path, begins: Callable[[], None] = lambda: None) -> Merged:
    """Write the merged model to `target`. AdapterError where base, target or disk are not as they must be. `begins`
    is called before the first file is written, after all that is refused beforehand."""
    base_hash = refuse_other_base(model_dir, adapter_dir)
    adapter = Adapter(adapter_dir)
    check_weights_match_config(model_dir)
    adapter_hash = sha256_of(adapter_dir / ADAPTER_WEIGHTS)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        _refuse_other_content(target, adapter_dir, adapter_hash, base_hash)
        return _there(target, already=True)
    _refuse_without_room(model_dir, target)
    begins()
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write(model_dir, adapter, fresh)
        repo, revision = f"merged from {model_dir.name}", adapter_dir.parent.name
        seal_model(fresh, repo=repo, revision=revision, commit=adapter_hash, base_model_hash=base_hash)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if target.exists():
        target.rmdir()
    fresh.rename(target)
    return _there(target)


def _there(target: Path, already: bool = False) -> Merged:
    files = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    return Merged(target, sum(files), len(files) - len({SUMS, ORIGIN}), already)


def _refuse_other_content(target: Path, adapter_dir: Path, adapter_hash: str, base_hash: str) -> None:
    """AdapterError, with what removes it, where what lies at `target` is not this adapter merged into this base, each
    file as it was sealed."""
    step = adapter_dir.parent.name
    try:
        origin = read_origin(target)
        same = origin.get("commit") == adapter_hash and origin.get("base_model_hash") == base_hash
        sums = parse_sums((target / SUMS).read_text(encoding="utf-8")) if same else {}
        whole = bool(sums) and all(
            (target / name).is_file() and sha256_of(target / name) == sums[name] for name in sums
        )
    except (OSError, ValueError):
        origin, same, whole = {}, False, False
    if whole:
        return
    content = f"{step}, damaged," if same else str(origin.get("revision", "")) or "something else"
    raise AdapterError(
        f"{target} is not empty: {content} lies there, not {step} whole; rm -r {shlex.quote(str(target))} removes it, "
        "--to DIR says another place"
    )


def refuse_other_base(model_dir: Path, adapter_dir: Path) -> str:
    """The base's hash; AdapterError where the adapter's checkpoint is damaged or was trained on another one."""
    refuse_damaged(adapter_dir)
    base_hash = base_model_hash(model_dir)
    trained_on = trainer_state(adapter_dir).get("base_model", base_hash)
    if trained_on != base_hash:
        raise AdapterError(
            f"{adapter_dir} was trained on another base model ({str(trained_on)[:12]}) than {model_dir} "
            f"({base_hash[:12]})"
        )
    return base_hash


def _refuse_without_room(model_dir: Path, target: Path) -> None:
    place = next(parent for parent in target.resolve().parents if parent.exists())
    needed, free = weight_bytes(model_dir) + ROOM_TO_SPARE, shutil.disk_usage(place).free
    if needed > free:
        raise AdapterError(
            f"the merged model needs {size_text(needed)} at {place}, {size_text(free)} are free; "
            "say another place with --to DIR"
        )


def _write(model_dir: Path, adapter: Adapter, fresh: Path) -> None:
    base_tensors = {text_name(tensor): tensor for tensor in places(model_dir)}
    config = read_config(model_dir)
    flags = [one["tie_word_embeddings"] for one in (config, text_settings(config)) if "tie_word_embeddings" in one]
    tied = bool(flags[0]) if flags else HEAD not in base_tensors  # head and embedding are one tensor
    extra = _untied(config, adapter, base_tensors) if tied else {}
    foreign = sorted(adapter.parts.keys() - base_tensors.keys() - {text_name(tensor) for tensor in extra})
    if tied and HEAD not in adapter.told_apart:
        foreign = [name for name in foreign if name != HEAD]  # rows of the embedding, told twice
    if foreign:
        raise AdapterError(f"{adapter.folder} is not for this model, which has no {', '.join(foreign[:3])}")
    if extra and "tokens" in adapter.parts.get(EMBEDDING, {}) and "A" in adapter.parts.get(HEAD, {}):
        raise AdapterError(
            f"{adapter.folder} changes token rows of an embedding and the head that shares it each by itself, "
            "and is not understood here; take one of the two"
        )
    tensors = list(base_tensors.values())
    change = TensorChange(adapter, Experts(adapter, model_dir, tensors) if adapter.experts else None)
    names = shard_names(model_dir)
    for name in names:
        _write_shard(model_dir, change, name, fresh / name, extra if name == names[-1] else {})
    copy_files(model_dir, fresh, (*SMALL, *LICENCE))
    name_end_of_turn(fresh, config)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if len(names) > 1 or (model_dir / INDEX).is_file():
        _write_index(fresh, names)


def _untied(config: dict[str, Any], adapter: Adapter, base_tensors: Mapping[str, str]) -> dict[str, str]:
    """Tensor -> the one of the base it begins as, for those the base shares and the adapter tells apart; by their names
    in files, which `base_tensors` has by the text part's own.

    An embedding or head trained whole, or with a LoRA, is the adapter's own: the other one stays what it was.
    """
    if not adapter.told_apart & {EMBEDDING, HEAD}:
        return {}
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False
    embedding = base_tensors[EMBEDDING]
    beside = "language_model." if embedding.startswith("language_model.") else ""
    return {} if HEAD in base_tensors else {f"{beside}{HEAD}": embedding}


def _write_shard(model_dir: Path, change: TensorChange, name: str, to: Path, extra: dict[str, str]) -> None:
    """One file, tensor after tensor, in safetensors' layout: 8 bytes of header length, JSON, data."""
    source, files = entries(model_dir / name), places(model_dir) if extra else {}
    written = source | {tensor: entries(model_dir / files[origin])[origin] for tensor, origin in extra.items()}
    with to.open("wb") as out, safe_open(model_dir / name, "pt") as base:
        out.write(_header(written))
        for tensor in source:
            out.write(_bytes_of(change, tensor, base.get_tensor(tensor)))
        for tensor, origin in extra.items():
            with safe_open(model_dir / files[origin], "pt") as file:
                out.write(_bytes_of(change, tensor, file.get_tensor(origin)))


def _header(source: dict[str, dict[str, Any]]) -> bytes:
    """Of tensors with the types and shapes of the source's, one behind another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, entry in source.items():
        begin, end = entry["data_offsets"]
        header[tensor] = {**entry, "data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(change: TensorChange, name: str, tensor: torch.Tensor) -> memoryview:
    changed = change.of(name, tensor)
    if changed is not None:
        if changed.shape != tensor.shape:
            raise AdapterError(f"{name} is {tuple(tensor.shape)} in the base and {tuple(changed.shape)} in the adapter")
        if not bool(torch.isfinite(changed).all()):
            raise AdapterError(f"{name} would hold values that are not finite; the adapter is broken")
        tensor = changed.to(tensor.dtype)
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _write_index(fresh: Path, names: list[str]) -> None:
    placed = {tensor: name for name in names for tensor in entries(fresh / name)}
    offsets = [entry["data_offsets"] for name in names for entry in entries(fresh / name).values()]
    total = sum(end - begin for begin, end in offsets)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}, indent=2)
    (fresh / INDEX).write_text(text + "\n", encoding="utf-8")


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, required=True, help="a checkpoint's adapter folder")
    parser.add_argument("--to", type=Path, required=True, help="where the merged model goes")
    parser.add_argument("--attached", action="store_true", help="JSON lines, and end with standard input")
    args = parser.parse_args()

    def work() -> None:
        if args.attached:
            attached.end_with_input()
        made = merge(args.model, args.adapter, args.to, lambda: attached.tell(merging=str(args.to)))
        attached.tell(folder=str(made.folder), bytes=made.nbytes, files=made.files, already=made.already)

    return attached.run(work, args.attached)


if __name__ == "__main__":
    sys.exit(main())
