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
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from training.data import IGNORED, Sample
from training.data.build import TRAIN
from training.errors import AdapterError
from training.node import attached
from training.node.adapter.decoding import Chooser, Voice
from training.node.adapter.held_out import exchange_of, held_out_at, learned_before
from training.node.adapter.models import BASE, TUNED, load_base, load_tuned, reader
from training.node.adapter.scores import score
from training.node.device import device
from training.node.metrics.report import make_report
from training.questions import Sampling
from training.run_folder import METRICS, write_atomically

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


def measure(model_dir: Path, adapter: Path | None, asked: Asked, tuned: bool = True) -> Measured:
    """Load a model of its own, measure it, and let it go: the base with `adapter` or that whole model, or
    not `tuned` the base as that was trained beside it."""
    began = time.monotonic()
    learned = adapter if tuned else None
    model = load_tuned(model_dir, learned) if learned else load_base(model_dir, adapter)
    each = [_loss_of(model, sample) for sample in asked.samples]
    loss, hits, tokens = (sum(numbers) for numbers in zip(*each, strict=True))
    rejected = [_loss_of(model, sample)[0] for sample in asked.rejected]
    prompts, said, wanted = _answers(model, asked)
    scores = score(said, wanted) if said else None
    del model
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
    return Measured(
        loss=loss / tokens,
        perplexity=math.exp(min(loss / tokens, 700)),
        token_accuracy=hits / tokens,
        samples=len(asked.samples),
        tokens=tokens,
        answers=len(said),
        exact_match=scores.exact_match if scores else None,
        rouge_l=scores.rouge_l if scores else None,
        seconds=round(time.monotonic() - began, 2),
        examples=tuple(
            {"asked": prompt, "wanted": reference, "said": answer}
            for prompt, reference, answer in spread(list(zip(prompts, wanted, said, strict=True)), EXAMPLES)
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


def _answers(model: Any, asked: Asked) -> tuple[list[str], list[str], list[str]]:
    """What samples ask, spread over those that ask something, what the model says to it, and what is wanted."""
    found = spread([exchange for sample in asked.samples if (exchange := exchange_of(sample))], asked.answers)
    said = []
    for exchange in found:
        chooser = Chooser(asked.voice.own, asked.sampling)
        prompt = list(exchange.prompt)
        said.append(asked.voice.text(list(asked.voice.answer(reader(model), chooser, prompt, asked.sampling))))
    texts = [(asked.voice.conversation(list(one.prompt)), asked.voice.text(list(one.reference))) for one in found]
    return [prompt for prompt, _ in texts], said, [reference for _, reference in texts]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, at equal distances."""
    count = min(most, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def evaluate(model_dir: Path, adapter: Path | None, asked: Asked) -> dict[str, Any]:
    """{"base": ..., "tuned": ...}: two models, one after the other, never the same one with an adapter in it."""
    if not asked.samples:
        raise AdapterError("there is no sample to measure on")
    base = measure(model_dir, adapter, asked, tuned=False)
    tuned = measure(model_dir, adapter, asked) if adapter is not None else None
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
    given = held_out_at(args.data, voice.tokenizer, args.max_length, args.template_args, args.skip_bad)
    asked = Asked(given.samples, voice, args.answers, Sampling(args.max_new_tokens), given.rejected)
    found: dict[str, Any] = {"model": str(args.model), "adapter": str(args.adapter or ""), "data": str(args.data)}
    if args.of:
        found |= {"of": args.of, "learned_before": learned_before(given, args.out.parent / "data" / "prepared" / TRAIN)}
    found |= {"time": time.time(), **evaluate(args.model, args.adapter, asked)}
    write_atomically(args.out, json.dumps(found, indent=1) + "\n")
    attached.tell(evaluation=found)
    if (args.out.parent / METRICS).is_file():  # a run's own folder: its report shows the answers too
        make_report(args.out.parent)


def main() -> int:
    all_imported()
    args = _parsed()
    return attached.run(lambda: work(args), args.attached)


if __name__ == "__main__":
    sys.exit(main())
