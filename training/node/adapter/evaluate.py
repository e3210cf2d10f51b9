"""Measure the base model and the tuned one on records held out; each is loaded anew, by itself.

    python -m training.node.adapter.evaluate --model DIR --adapter DIR --data FILE.jsonl --out evaluation.json

Loss and perplexity over the learned tokens, of pairs those of the chosen answers, and how much likelier these are than
the rejected ones; exact match and ROUGE-L of greedy answers.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import gc
import json
import math
import re
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from training.data import encode
from training.data.answers import Rendered
from training.data.build import TRAIN
from training.data.encode import Encoder
from training.data.file_names import NAMES, called_by_user
from training.data.prepared import open_prepared
from training.data.questions import Sampling
from training.data.readers import records
from training.data.sample import CURE, IGNORED, Bad, BadRecord, DataError, Sample
from training.data.source import Data, data_of
from training.node import attached
from training.node.adapter.decoding import Chooser, Voice
from training.node.adapter.generate import BASE, TUNED, load_base, load_tuned, reader
from training.node.device import device
from training.node.metrics.report import make_report
from training.run.folder import METRICS, write_atomically
from training.text.problems import AdapterError

EXAMPLES = 5
"""Answers that are kept to be read, in the report of a run."""
CHUNK = 2048
"""Positions whose logits exist at once."""


@dataclass(frozen=True)
class Asked:
    """What to measure with."""

    samples: Sequence[Sample]
    voice: Voice
    answers: int
    """How many greedy answers to compare."""
    sampling: Sampling
    rejected: Sequence[Sample] = ()
    """Of pairs, beside each of the samples, which are then those of the chosen answers."""


@dataclass(frozen=True)
class Measured:
    """One model's numbers."""

    loss: float
    """Mean over all learned tokens."""
    perplexity: float
    token_accuracy: float
    samples: int
    tokens: int
    answers: int
    exact_match: float | None
    rouge_l: float | None
    seconds: float
    examples: tuple[dict[str, str], ...] = ()
    """Some answers: the conversation before it, what was wanted, what was said."""
    margins: tuple[float, ...] = ()
    """Of each pair by how many nats the chosen answer is likelier than the rejected one."""


def measure(model_dir: Path, adapter: Path | None, task: Asked, tuned: bool = True) -> Measured:
    """Load a model of its own, measure it, and let it go: the base with `adapter` or that whole model, or
    not `tuned` the base as that was trained beside it."""
    began = time.monotonic()
    learned = adapter if tuned else None
    model = load_tuned(model_dir, learned) if learned else load_base(model_dir, adapter)
    each = [_loss_of(model, sample) for sample in task.samples]
    loss, hits, tokens = (sum(numbers) for numbers in zip(*each, strict=True))
    rejected = [_loss_of(model, sample)[0] for sample in task.rejected]
    prompts, replies, wanted = _answers(model, task)
    scores = score(replies, wanted) if replies else None
    del model
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
    return Measured(
        loss=loss / tokens,
        perplexity=math.exp(min(loss / tokens, 700)),
        token_accuracy=hits / tokens,
        samples=len(task.samples),
        tokens=tokens,
        answers=len(replies),
        exact_match=scores.exact_match if scores else None,
        rouge_l=scores.rouge_l if scores else None,
        seconds=round(time.monotonic() - began, 2),
        examples=tuple(
            {"asked": prompt, "wanted": reference, "said": answer}
            for prompt, reference, answer in spread(list(zip(prompts, wanted, replies, strict=True)), EXAMPLES)
        ),
        margins=tuple(against - of[0] for against, of in zip(rejected, each, strict=False)),
    )


def _loss_of(model: Any, sample: Sample) -> tuple[float, int, int]:
    """Sum of the learned tokens' losses, how many were the likeliest, how many there are."""
    ids, labels = torch.tensor([list(sample.ids)]), torch.tensor(list(sample.labels))
    places = torch.nonzero(labels[1:] != IGNORED).flatten()
    loss, hits = 0.0, 0
    for some in places.split(CHUNK):
        with torch.inference_mode():
            out = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=some.to(model.device))
        targets = labels[1:][some].to(model.device)
        logits = out.logits[0].float()
        loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
        hits += int((logits.argmax(-1) == targets).sum())
    return loss, hits, len(places)


def _answers(model: Any, task: Asked) -> tuple[list[str], list[str], list[str]]:
    """What samples ask, spread over those that ask something, what the model says to it, and what is wanted."""
    exchanges = spread([exchange for sample in task.samples if (exchange := exchange_of(sample))], task.answers)
    replies = []
    for exchange in exchanges:
        prompt = list(exchange.prompt)
        chooser = Chooser(task.voice, prompt, task.sampling)
        replies.append(task.voice.text(list(task.voice.answer(reader(model), chooser, prompt, task.sampling))))
    texts = [(task.voice.conversation(list(one.prompt)), task.voice.text(list(one.reference))) for one in exchanges]
    return [prompt for prompt, _ in texts], replies, [reference for _, reference in texts]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, at equal distances."""
    count = min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def evaluate(model_dir: Path, adapter: Path | None, task: Asked) -> dict[str, Any]:
    """{"base": ..., "tuned": ...}: two models, one after the other, never the same one with an adapter in it."""
    base = measure(model_dir, adapter, task, tuned=False)
    tuned = measure(model_dir, adapter, task) if adapter is not None else None
    return {BASE: told(base), TUNED: told(tuned) | won(tuned, base) if tuned else None}


def told(measured: Measured) -> dict[str, Any]:
    """One model's numbers; of pairs the share whose chosen answer is the likelier one, and by how many nats on
    average."""
    numbers, margins = asdict(measured), measured.margins
    del numbers["margins"]
    if not margins:
        return numbers
    of_pairs = {"pair_accuracy": fmean(margin > 0 for margin in margins), "pair_margin": fmean(margins)}
    return numbers | {"pairs": len(margins), **of_pairs}


def won(tuned: Measured, base: Measured) -> dict[str, Any]:
    """Of pairs the share that the tuned model tells apart by more nats than the base model does, and by how many more
    on average; nothing elsewhere. Times dpo.beta that is the mean margin of rewards."""
    gained = [own - before for own, before in zip(tuned.margins, base.margins, strict=True)]
    return {"win_rate": fmean(gain > 0 for gain in gained), "win_margin": fmean(gained)} if gained else {}


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, help="an adapter's folder, in PEFT's format, or a whole tuned model's")
    parser.add_argument("--data", type=Path, required=True, help="records held out, or a prepared folder of them")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad records out instead of stopping")
    parser.add_argument("--of", default="", help="what other data than the run's own split are called")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens kept of a record")
    parser.add_argument("--answers", type=int, default=50, help="greedy answers to compare; 0 compares none")
    parser.add_argument("--max-new-tokens", type=int, default=Sampling.max_new_tokens)
    parser.add_argument(
        "--template-args", type=json.loads, default={}, help="JSON: what the run gave the chat template"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--attached", action="store_true", help="JSON lines, and end with standard input")
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    if args.attached:
        attached.end_with_input()
    voice = Voice.of(args.model, args.template_args)
    if voice.note:
        attached.tell(note=voice.note)
    held_out = held_out_at(args.data, voice.tokenizer, args.max_length, args.template_args, args.skip_bad)
    task = Asked(held_out.samples, voice, args.answers, Sampling(args.max_new_tokens), held_out.rejected)
    evaluation: dict[str, Any] = {"model": str(args.model), "adapter": str(args.adapter or ""), "data": str(args.data)}
    if args.of:
        evaluation |= {
            "of": args.of,
            "learned_before": learned_before(held_out, args.out.parent / "data" / "prepared" / TRAIN),
        }
    evaluation |= {"cut": held_out.cut, "max_length": args.max_length, "time": time.time()}
    evaluation |= evaluate(args.model, args.adapter, task)
    write_atomically(args.out, json.dumps(evaluation, indent=1) + "\n")
    attached.tell(evaluation=evaluation)
    if (args.out.parent / METRICS).is_file():  # a run's own folder: its report shows the answers too
        make_report(args.out.parent)


def main() -> int:
    all_imported()
    args = _parsed()
    return attached.run(lambda: work(args), args.attached)


# What a model is measured on: records it has not learned from, as samples.


@dataclass(frozen=True)
class HeldOut:
    """Samples to be said; of pairs those of the chosen answers, and beside each that of the rejected one."""

    samples: Sequence[Sample]
    rejected: Sequence[Sample] = ()
    cut: int = 0
    """How many texts were longer than max_length, and end there."""


def held_out_at(
    path: Path,
    tokenizer: Any,
    max_length: int,
    template_args: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
) -> HeldOut:
    """What data files hold, or a prepared folder; with `skip_bad` without the records that cannot be used. Raises
    DataError."""
    if (path / "report.json").is_file():
        prepared = open_prepared(path)
        samples = [sample for number in range(prepared.rows) for sample in prepared.row(number)]
        step = 2 if prepared.report.pairs else 1
        return HeldOut(samples[::step], samples[1::2] if step == 2 else (), prepared.report.truncated)
    encoder = Encoder(tokenizer, max_length, "assistant", template_args)
    data = data_of(path, called_by_user(path.parent, path.with_name(f"{path.name}.{NAMES}")))
    texts, paired = _rendered(data, encoder, skip_bad)
    made = encoder.samples(texts)
    samples, cut = [sample for sample, _ in made], sum(left_out > 0 for _, left_out in made)
    if paired:
        both = zip(samples[::2], samples[1::2], strict=True)
        usable = [pair for pair in both if not encode.fault(pair, max_length)]
        held_out = HeldOut([chosen for chosen, _ in usable], [rejected for _, rejected in usable], cut)
    else:
        held_out = HeldOut([sample for sample in samples if sample.learned], cut=cut)
    if not held_out.samples:
        raise DataError(f"{data.name}: no record has an answer within {max_length} tokens")
    return held_out


def learned_before(held_out: HeldOut, trained: Path) -> int | None:
    """How many of the samples are, token for token, among the prepared ones; None where those do not lie there."""
    if not (trained / "report.json").is_file():
        return None
    prepared = open_prepared(trained)
    counts = Counter(tuple(sample.ids) for sample in held_out.samples)
    lengths = set(map(len, counts))
    trained_ids = (sample.ids for number in range(prepared.rows) for sample in prepared.row(number))
    return sum(counts.pop(tuple(ids), 0) for ids in trained_ids if len(ids) in lengths)


def _rendered(data: Data, encoder: Encoder, skip_bad: bool) -> tuple[list[Rendered], bool]:
    """The texts, and whether each two of them are a pair."""
    bad, texts, paired = Bad(skip_bad, cure=CURE), list[Rendered](), False
    for where, record in records(data, bad):
        paired = record.rejected is not None
        try:
            texts += encode.rendered(encoder, record) if paired else encoder.rendered(record)
        except BadRecord as error:
            bad.add(where, str(error))
    bad.refuse(len(texts))
    return texts, paired


@dataclass(frozen=True)
class Exchange:
    """What a sample asks, and the answer it has."""

    prompt: Sequence[int]
    reference: Sequence[int]


def exchange_of(sample: Sample) -> Exchange | None:
    """A sample's last answer and all before it; None where it is learned from its beginning, and asks nothing."""
    end = len(sample.labels)
    while end and sample.labels[end - 1] == IGNORED:
        end -= 1
    start = end
    while start and sample.labels[start - 1] != IGNORED:
        start -= 1
    return Exchange(sample.ids[:start], sample.ids[start:end]) if 0 < start < end else None


# How close an answer is to what it should have been: exact match and ROUGE-L, for any script.

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
_WORDS = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")


@dataclass(frozen=True)
class AnswerScores:
    """Means over all answers, each from 0 to 1."""

    exact_match: float
    rouge_l: float


class WordScores:
    """Words for rouge-score: letters and digits of any script, Chinese, Japanese and Korean character by character.

    The library's own tokenizer keeps a-z and 0-9 alone, so that every Chinese answer scores 0.
    """

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in order."""
        return _WORDS.findall(normalised(text))


def normalised(text: str) -> str:
    """One form of what looks the same: width, case, spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def score(answers: Sequence[str], references: Sequence[str]) -> AnswerScores:
    """Exact match after `normalised`, and the F-measure of ROUGE-L."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise AdapterError(f"ROUGE-L needs the rouge-score library: {error}") from error
    scorer = RougeScorer(["rougeL"], tokenizer=WordScores())
    pairs = list(zip(answers, references, strict=True))
    return AnswerScores(
        fmean(normalised(answer) == normalised(reference) for answer, reference in pairs),
        fmean(scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in pairs),
    )


if __name__ == "__main__":
    sys.exit(main())
