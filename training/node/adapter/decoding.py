"""From a prompt to an answer, token by token: the same words whether one process computes them or many."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.generation import StopStringCriteria

from training.data.encode import Encoder
from training.data.questions import Question, Sampling
from training.data.sample import BadRecord, DataError
from training.data.shapes import question_of
from training.models.folder import read_config
from training.recipe.model_types import text_settings
from training.text.files import GENERATION, object_in, token_ids
from training.text.problems import AdapterError

Forward = Callable[[Sequence[int]], torch.Tensor | None]
"""Reads some more tokens; gives the logits behind the last one, (vocabulary,), on whoever has them."""
Choose = Callable[[torch.Tensor | None, Sequence[int]], int]
"""The next token after all tokens so far."""
WHO = frozenset({"system", "user", "human", "assistant", "model"})
"""What templates call the sides of a conversation."""
UNHEEDED = ("guidance_scale", "watermarking_config", "num_beams", "token_healing")
"""Generation settings that a token chosen from one model's logits cannot follow."""
OPENED = re.compile(r"<think>\s*(</think>)?\s*$")
"""Thoughts, empty or begun, that a template asks an answer with."""


class OwnSettings(GenerationMixin):
    """What transformers makes of generation settings by itself, for a model that lies elsewhere."""

    config = PretrainedConfig()


class Chooser:
    """Picks tokens by the model's own generation settings: greedily, or at a temperature with a seed of its own.

    On the CPU, so that a seed means the same choice on every device.
    """

    def __init__(self, voice: Voice, prompt: Sequence[int], sampling: Sampling) -> None:
        self.greedy = sampling.temperature == 0
        self.generator = torch.Generator().manual_seed(sampling.seed)
        settings = copy.deepcopy(voice.own)
        settings.do_sample, settings.temperature = not self.greedy, sampling.temperature
        settings.top_p = settings.top_p if sampling.top_p is None else sampling.top_p
        settings.eos_token_id = sorted(voice.stops) or None
        settings.max_length = len(prompt) + voice.room(prompt, sampling)
        settings.guidance_scale = settings.watermarking_config = None
        transformers = OwnSettings()
        transformers._prepare_special_tokens(settings, device="cpu")
        self.processors = transformers._get_logits_processor(
            settings, len(prompt), encoder_input_ids=torch.tensor([list(prompt)]), device="cpu"
        )

    def __call__(self, logits: torch.Tensor | None, ids: Sequence[int]) -> int:
        assert logits is not None
        scores = self.processors(torch.tensor([list(ids)]), logits.float().cpu()[None])
        if self.greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))


@dataclass(frozen=True)
class Voice:
    """What a model's folder says about talking with it, apart from its weights."""

    tokenizer: Any
    own: GenerationConfig
    stops: frozenset[int]
    """What ends an answer: the model's own ends, and the end of turn that a run teaches it."""
    longest: int
    """Tokens it can hold, prompt and answer."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given besides the conversation: what a run trained with."""

    @staticmethod
    def of(model_dir: Path, template_args: Mapping[str, Any] | None = None) -> Voice:
        """Read from a model's folder."""
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        config = read_config(model_dir)
        text = text_settings(config)
        own: GenerationConfig = GenerationConfig.from_dict(object_in(model_dir / GENERATION, json.loads))
        own_ends = (tokenizer.eos_token_id, own.eos_token_id, config.get("eos_token_id"), text.get("eos_token_id"))
        stops = frozenset(token_ids(*own_ends, end_of_turn_id(tokenizer)))
        longest = text.get("max_position_embeddings") or 1 << 30
        return Voice(tokenizer, own, stops, longest, dict(template_args or {}))

    @property
    def note(self) -> str:
        """Which of the model's generation settings an answer does not follow; empty where it follows all."""
        names = [name for name in UNHEEDED if getattr(self.own, name, None) not in (None, False, 1)]
        return f"the model's {GENERATION} sets {', '.join(names)}, which answers here do not follow" if names else ""

    @cached_property
    def encoder(self) -> Encoder:
        """What made the tokens that were learned."""
        return Encoder(self.tokenizer, self.longest, "assistant", self.template_args)

    def prompt(self, question: Question) -> list[int]:
        """The tokens of a question, up to where the assistant's answer begins, as they were learned. Raises
        AdapterError."""
        try:
            return self.encoder.prompt(question_of(question))
        except (BadRecord, DataError) as error:
            raise AdapterError(str(error)) from error

    def text(self, ids: Sequence[int]) -> str:
        """The words of some tokens."""
        words: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return words.strip()

    def conversation(self, ids: Sequence[int]) -> str:
        """What a prompt says, without the template's signs: of several turns each with who says it; all its words where
        no special tokens set turns apart."""
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        special = sorted(filter(None, self.tokenizer.all_special_tokens), key=len, reverse=True)
        turns, who = [], ""
        for part in re.split("|".join(map(re.escape, special)) or "(?!)", text):
            first, _, rest = OPENED.sub("", part).strip().partition("\n")
            is_name = first.strip().lower() in WHO
            who = first.strip() if is_name else who
            if words := (rest if is_name else f"{first}\n{rest}").strip():
                turns.append((f"{who}: " if who else "", words))
                who = ""
        if not special or not turns:
            return self.text(ids)
        return turns[0][1] if len(turns) == 1 else "\n\n".join(f"{name}{words}" for name, words in turns)

    def room(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """The most tokens of an answer. AdapterError where there is room for none."""
        room = min(sampling.max_new_tokens, self.longest - len(prompt))
        if room < 1:
            raise AdapterError(f"a prompt of {len(prompt)} tokens leaves no room: the model holds {self.longest}")
        return room

    def answer(self, forward: Forward, choose: Choose, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
        """The answer's tokens one after another, until the model stops by itself or has said enough."""
        texts = self.own.stop_strings
        ends = StopStringCriteria(self.tokenizer, texts) if texts else None
        ids, fresh = list(prompt), list(prompt)
        for _ in range(self.room(prompt, sampling)):
            token = choose(forward(fresh), ids)
            if token in self.stops:
                return
            yield token
            ids.append(token)
            fresh = [token]
            if ends is not None and ends(torch.tensor([ids]), torch.empty(0)):
                return


# The token a tuned model ends its answers with: its chat template's, which a base model's own files may not name.


def end_of_turn_id(tokenizer: Any) -> int | None:
    """What a run teaches as the end of an answer; None where the tokenizer has nothing to end one with."""
    try:
        return Encoder(tokenizer, 1, "assistant").end_id
    except DataError:  # nothing was trained with such a tokenizer
        return None


def name_end_of_turn(folder: Path, config: dict[str, Any]) -> None:
    """Have a model folder's generation settings end with the turn, beside what they ended with before."""
    if not any(folder.glob("tokenizer*")):  # and so no turns
        return
    end = end_of_turn_id(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    path = folder / GENERATION
    own = object_in(path, json.loads)
    before = own.get("eos_token_id", config.get("eos_token_id", text_settings(config).get("eos_token_id")))
    if end is None or end in token_ids(before):
        return
    own["eos_token_id"] = [end, *sorted(set(token_ids(before)))]
    path.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
