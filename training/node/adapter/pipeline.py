"""A model too big for one card answers on all of them: each rank holds some of its layers. Runs on the nodes.

    python -m training.node.adapter.pipeline --run DIR

started once per rank, as training is. The run folder's questions.json says what to ask which model;
its `adapter`, where there is one, is the tuned one's. What goes over the network is one hidden state a token from
rank to rank, and the token chosen. Rank 0 writes result.json.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import nn
from transformers import AutoConfig, DynamicCache

from training.cost.pipeline import SPLITTABLE
from training.data.questions import Question, Sampling
from training.node.adapter.decoding import Chooser, Forward, Voice
from training.node.adapter.generate import BASE, TUNED, answers, speaking, stretch_as_trained
from training.node.adapter.merge import EMBEDDING, HEAD, refuse_other_base
from training.node.adapter.weights import PREFIX, Adapter
from training.node.architecture import build
from training.node.base_weights import check_weights_match_config
from training.node.device import DeviceError, device
from training.node.heartbeat import join as join_ranks
from training.node.heartbeat import take_place
from training.node.stages import LAYERS, read_tensors, shares
from training.run.causes import OF_CODE
from training.run.events import Failed, emit
from training.run.folder import RESULT, write_atomically
from training.text.counts import size_text
from training.text.problems import AdapterError

QUESTIONS = "questions.json"
TIMEOUT = timedelta(minutes=30)
"""A slow disk may take many minutes to give a stage its layers."""


class AnswerStage:
    """One rank's part of a model, with its part of the adapter: only these tensors were read."""

    def __init__(self, model_dir: Path, adapter: Path | None, rank: int, world: int, device: torch.device) -> None:
        whole = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        if whole.model_type not in SPLITTABLE:
            raise AdapterError(f"a {whole.model_type} model cannot be spread; possible: {', '.join(SPLITTABLE)}")
        check_weights_match_config(model_dir)
        self.device, self.tied = device, bool(whole.tie_word_embeddings)
        layer = 4 * whole.hidden_size**2 + 3 * whole.hidden_size * whole.intermediate_size
        of_layer = whole.vocab_size * whole.hidden_size / layer
        self.share = shares(whole.num_hidden_layers, world, of_layer)[rank]
        self.loaded_bytes = 0
        self.model: Any = self._load(model_dir, _part_of(whole, self.share.layers))
        self.inner = self.model.model
        stretch_as_trained(self.model, adapter)
        self.swaps: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        if adapter is not None:
            self.model = self._with_adapter(model_dir, adapter)
        self.names = (BASE, TUNED) if adapter is not None else (BASE,)
        self.voice = Voice.of(model_dir)

    def _load(self, model_dir: Path, config: Any) -> Any:
        with torch.device("meta"):
            model: Any = build(config, dtype=config.dtype)
        inner = model.model
        if not self.share.is_first:
            inner.embed_tokens = nn.Identity()
        if not self.share.is_last:
            inner.norm, model.lm_head = nn.Identity(), nn.Identity()
        inner.rotary_emb = type(inner.rotary_emb)(config=config).to(self.device)  # computed, not loaded
        wanted = {name: self._origin(name) for name in model.state_dict()}
        tensors = read_tensors(model_dir, wanted, self.device, self.tied)
        self.loaded_bytes = sum(tensor.nbytes for tensor in tensors.values())
        model.load_state_dict(tensors, assign=True)
        return model.eval()

    def _origin(self, name: str) -> str:
        """The model's own name of one of our tensors: our layers are numbered from 0."""
        if not name.startswith(LAYERS):
            return name
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{int(number) + self.share.layers.start}.{rest}"

    def _with_adapter(self, model_dir: Path, folder: Path) -> Any:
        refuse_other_base(model_dir, folder)
        adapter = Adapter(folder)
        if whole := [
            target for target, parts in adapter.parts.items() if target.startswith(LAYERS) and "whole" in parts
        ]:
            raise AdapterError(f"{folder}: {whole[0]} was trained whole, which cannot be spread")
        mine = {}
        for name in adapter.names:
            number, _, rest = name.removeprefix(PREFIX + LAYERS).partition(".")
            if name.startswith(PREFIX + LAYERS) and int(number) in self.share.layers:  # of the others: `_swaps`
                tensor = adapter.file.get_tensor(name).to(self.device)
                mine[f"{PREFIX}{LAYERS}{int(number) - self.share.layers.start}.{rest}"] = tensor
                self.loaded_bytes += tensor.nbytes
        self.swaps = list(self._swaps(adapter))
        config = LoraConfig.from_pretrained(str(folder))
        config.inference_mode, config.modules_to_save, config.trainable_token_indices = True, None, None
        model = get_peft_model(self.model, config, autocast_adapter_dtype=False)
        wrong = set_peft_model_state_dict(model, mine)
        trained = sum(".lora_" in name for name, _ in model.named_parameters())
        if wrong.unexpected_keys or trained != len(mine):
            raise AdapterError(f"{folder} does not fit the model: {len(mine)} tensors for {trained} places")
        return model.eval()

    def _swaps(self, adapter: Adapter) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        """Embedding, norm and head as the base has them and as the adapter has them: whole, or with rows of its own.

        Rows of an embedding that is the head too change both; an embedding trained whole leaves the head.
        """
        for name, parameter in self.model.named_parameters():
            if name.startswith(LAYERS):
                continue
            target = name
            if name == HEAD and name not in adapter.parts and self.tied:
                target = EMBEDDING if "tokens" in adapter.parts.get(EMBEDDING, {}) else HEAD
            if target in adapter.parts:
                tuned = adapter.merged(target, parameter.data.cpu()).to(parameter.data)
                yield parameter, parameter.data, tuned

    @contextlib.contextmanager
    def speaking(self, who: str) -> Iterator[None]:
        """Within it this part is the base's, or the tuned model's."""
        with speaking(self.model, who):
            for parameter, base, tuned in self.swaps:
                parameter.data = tuned if who == TUNED else base
            yield

    def reader(self) -> Forward:
        """Reads tokens together with the other ranks; the last one gets the logits."""
        cache = DynamicCache(config=self.inner.config)

        def forward(ids: Sequence[int]) -> torch.Tensor | None:
            with torch.inference_mode():
                if self.share.is_first:
                    inputs = {"input_ids": torch.tensor([list(ids)], device=self.device)}
                else:
                    size = (1, len(ids), self.inner.config.hidden_size)
                    hidden = torch.empty(size, dtype=self.inner.config.dtype, device=self.device)
                    dist.recv(hidden, self.share.rank - 1)
                    inputs = {"inputs_embeds": hidden}
                out = self.inner(**inputs, past_key_values=cache, use_cache=True).last_hidden_state
                if self.share.is_last:
                    head = self.model.get_output_embeddings()
                    logits: torch.Tensor = head(out[:, -1])[0]
                    return logits
                dist.send(out.contiguous(), self.share.rank + 1)
                return None

        return forward

    def choose(self, chooser: Chooser, logits: torch.Tensor | None, ids: Sequence[int]) -> int:
        """The last rank chooses, and tells the others."""
        token = torch.tensor([chooser(logits, ids) if self.share.is_last else -1], device=self.device)
        dist.broadcast(token, src=self.share.world - 1)
        return int(token.item())

    def answer(self, who: str, question: Question, sampling: Sampling) -> str:
        """The whole answer, on every rank."""
        voice = self.voice
        with self.speaking(who):
            prompt = voice.prompt(question)
            choose = partial(self.choose, Chooser(voice, prompt, sampling))
            return voice.text(list(voice.answer(self.reader(), choose, prompt, sampling)))


def _part_of(whole: Any, layers: range) -> Any:
    """The configuration of a model that has these layers alone."""
    config = copy.deepcopy(whole)
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = whole.layer_types[layers.start : layers.stop]
    return config


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    run_dir: Path = parser.parse_args().run
    try:
        run(run_dir)
    except (AdapterError, DeviceError) as error:
        print(error, flush=True)
        emit(Failed(OF_CODE[error.exit_code], str(error)))
        return error.exit_code
    dist.destroy_process_group()
    return 0


def run(run_dir: Path) -> None:
    """What questions.json asks for, on this rank."""
    request = json.loads((run_dir / QUESTIONS).read_text(encoding="utf-8"))
    model_dir = Path(request["model"])
    mine = device(take_place().local_rank)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    join_ranks("nccl" if mine.type == "cuda" else "gloo", TIMEOUT)
    dist.barrier()  # a rank that is refused leaves; whoever was still connecting to it would wait for TIMEOUT
    began = time.monotonic()
    adapter = run_dir / "adapter" if (run_dir / "adapter").is_dir() else None
    stage = AnswerStage(model_dir, adapter, dist.get_rank(), dist.get_world_size(), mine)
    stage.voice = replace(stage.voice, template_args=request.get("template_args", {}))
    loaded: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(loaded, stage.loaded_bytes)
    head = stage.share.is_first
    if head:
        print(f"loaded in {time.monotonic() - began:.0f} s: {[size_text(n) for n in loaded]}", flush=True)
    answered = []
    for answer in answers(stage.names, stage.answer, request["questions"], Sampling(**request["sampling"])):
        answered.append(answer)
        if head:
            print(f"answered {len(answered)} of {len(request['questions'])}", flush=True)
    if head:
        result = {"run_id": run_dir.name, "answers": answered, "loaded_bytes": loaded, "note": stage.voice.note}
        write_atomically(run_dir / RESULT, json.dumps(result, ensure_ascii=False) + "\n")
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
