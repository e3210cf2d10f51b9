"""Records: checking JSONL, tokenising it into learnable samples, and the order in which steps consume them.

Reading and checking need no torch, so the control side runs them before anything is shipped.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training.sums import sha256_of

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Label of a token that is read but not learned; torch's cross-entropy skips it."""

Shape = Literal["messages", "prompt/completion"]
Messages = list[dict[str, str]]


class DataError(ValueError):
    """The data cannot be trained on; the message says the file, the line and what is wrong there."""


@dataclass(frozen=True)
class DataSummary:
    """What a checked file holds."""

    records: int
    shape: Shape
    sha256: str


@dataclass(frozen=True)
class Sample:
    """One tokenised record; `labels` are the ids where the model learns, IGNORED elsewhere, unshifted."""

    ids: array[int]
    labels: array[int]

    @property
    def learned(self) -> int:
        """Tokens that count in the loss: each is predicted from the one before, so the first never does."""
        return sum(label != IGNORED for label in self.labels[1:])


def check_file(path: Path) -> DataSummary:
    """Read every line of `path`; DataError names the first bad one. Nothing is tokenised."""
    records = 0
    shape: Shape | None = None
    for number, found, _ in _records(path):
        if shape not in {None, found}:
            raise DataError(f"{path} line {number}: {found}, but the lines before are {shape}")
        shape = found
        records += 1
    if shape is None:
        raise DataError(f"{path}: the file is empty")
    return DataSummary(records, shape, sha256_of(path))


def _records(path: Path) -> Iterator[tuple[int, Shape, Messages]]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, *_messages(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} line {number}: not UTF-8 at byte {error.start + 1}") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {number}: not JSON: {error.msg} at character {error.pos + 1}") from error
        except _BadRecord as error:
            raise DataError(f"{path} line {number}: {error}") from error


class _BadRecord(ValueError):
    """What is wrong with one record, before the line is known."""


def _messages(record: Any) -> tuple[Shape, Messages]:
    if not isinstance(record, dict):
        raise _BadRecord(f"an object is expected, found {type(record).__name__}")
    if "messages" in record:
        return "messages", _conversation(record["messages"])
    if "prompt" in record and "completion" in record:
        pair = [("user", record["prompt"]), ("assistant", record["completion"])]
        return "prompt/completion", _conversation([{"role": role, "content": text} for role, text in pair])
    raise _BadRecord(f"neither messages nor prompt and completion; keys: {', '.join(map(str, record)) or 'none'}")


def _conversation(turns: Any) -> Messages:
    if not isinstance(turns, list) or not turns:
        raise _BadRecord("messages must be a list of at least one turn")
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise _BadRecord(f"turn {place} needs a role and a content of text")
        if turn.get("role") not in {"system", "user", "assistant"}:
            raise _BadRecord(f"turn {place} has the role {turn.get('role')!r}; system, user and assistant are known")
        if turn["role"] == "system" and place > 1:
            raise _BadRecord(f"turn {place} is a system turn; only the first may be")
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise _BadRecord("no assistant turn, so nothing to learn")
    if "user" not in roles[: roles.index("assistant")]:
        raise _BadRecord("the assistant speaks before any user turn")
    if not any(turn["content"].strip() for turn in turns if turn["role"] == "assistant"):
        raise _BadRecord("every assistant turn is empty")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def tokenize(path: Path, tokenizer: Any, max_length: int) -> tuple[list[Sample], int]:
    """Every learnable record of `path`, cut to `max_length`, and how many had nothing left to learn."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the base model's tokenizer has no chat template; use an instruction-tuned model")
    samples, empty = [], 0
    for number, _, messages in _records(path):
        try:
            sample = encode(messages, tokenizer, max_length)
        except _BadRecord as error:
            raise DataError(f"{path} line {number}: {error}") from error
        if sample.learned:
            samples.append(sample)
        else:
            empty += 1
    if not samples:
        raise DataError(f"{path}: no record has anything to learn within {max_length} tokens")
    return samples, empty


def encode(messages: Messages, tokenizer: Any, max_length: int) -> Sample:
    """One conversation by the model's own chat template, learning the assistant's words and end of turn.

    Stock templates (Qwen2.5's too) carry no {% generation %} marks, so the assistant's span is found by
    rendering the conversation up to each turn: what those renderings share with the whole one is context,
    the rest is learned.
    """

    def rendered(count: int, prompt: bool = False) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages[:count], tokenize=True, add_generation_prompt=prompt, return_dict=False
            )
        )

    ids = rendered(len(messages))
    labels = [IGNORED] * len(ids)
    special = set(tokenizer.all_special_ids)
    for place, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before, after = rendered(place), rendered(place + 1)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise _BadRecord(
                f"turn {place + 1} cannot be told apart: the chat template renders it differently later on"
            )
        # A generation prompt may say more than the finished turn does (DeepSeek-R1's opens <think>).
        start = _shared(rendered(place, prompt=True), after)
        end = len(after)
        # What a template adds behind the end-of-turn token (Qwen2.5: a newline) is never generated.
        while end > start and ids[end - 1] not in special and special & set(ids[start:end]):
            end -= 1
        labels[start:end] = ids[start:end]
    return Sample(array("l", ids[:max_length]), array("l", labels[:max_length]))


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


class Order:
    """Which samples each step consumes: a pure function of (seed, epoch, global sample index).

    It knows neither ranks nor micro-batches, so a run resumed on fewer machines goes on where it stopped.
    """

    def __init__(self, samples: int, seed: int, global_batch: int) -> None:
        self.samples, self.seed, self.global_batch = samples, seed, global_batch
        self._epoch = -1
        self._permutation: list[int] = []

    def step(self, step: int) -> list[int]:
        """Sample numbers of the optimizer step `step` (from 0), always `global_batch` of them."""
        first = step * self.global_batch
        return [self._sample(index) for index in range(first, first + self.global_batch)]

    def _sample(self, index: int) -> int:
        epoch, place = divmod(index, self.samples)
        if epoch != self._epoch:
            self._permutation = list(range(self.samples))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[place]


def micro_steps(global_batch: int, world_size: int, micro_batch: int) -> int:
    """Micro-batches every rank runs in one optimizer step, empty ones included."""
    most = -(-global_batch // world_size)
    return -(-most // micro_batch)


def micro_batches(batch: Sequence[int], rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    """This rank's part of a step's samples: as many micro-batches as on every other, so that each collective
    meets its partners; a rank with fewer samples has empty ones at the end."""
    mine = batch[rank::world_size]
    count = micro_steps(len(batch), world_size, micro_batch)
    return [list(mine[i * micro_batch : (i + 1) * micro_batch]) for i in range(count)]


def collate(samples: Sequence[Sample], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask and labels, each (samples, longest).

    Padding is masked by length, never by its id: a pad token that is also the end of turn would otherwise
    never be learned. No samples at all give one row of weight zero.
    """
    import torch

    longest = max((len(sample.ids) for sample in samples), default=2)
    rows = max(1, len(samples))
    ids = torch.full((rows, longest), pad_id, dtype=torch.long)
    labels = torch.full((rows, longest), IGNORED, dtype=torch.long)
    mask = torch.zeros((rows, longest), dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        ids[row, :length] = torch.tensor(sample.ids)
        labels[row, :length] = torch.tensor(sample.labels)
        mask[row, :length] = 1
    if not samples:
        mask[:] = 1  # a fully masked row would make the attention's softmax undefined
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
