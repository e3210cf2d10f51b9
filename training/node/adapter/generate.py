"""Ask the base model and the tuned one the same things.

    python -m training.node.adapter.generate --model DIR [--adapter DIR] --prompt TEXT [--prompt TEXT] [--json]
    python -m training.node.adapter.generate --model ... --prompts FILE.jsonl --json > ANSWERS.jsonl
    python -m training.node.adapter.generate --model ... --serve    one JSON conversation a line on standard input

Greedy unless a temperature is given. It ends with its standard input when it serves: nothing is left behind.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import DynamicCache

from training.data.questions import Question, Sampling, from_prompts, read_questions
from training.data.shapes import question_of
from training.models.folder import read_config, trainer_state
from training.node import architecture, attached
from training.node.adapter.decoding import Chooser, Forward, Voice
from training.node.adapter.merge import refuse_other_base
from training.node.adapter.weights import refuse_not_finite
from training.node.architecture import in_modules
from training.node.base_weights import check_weights_match_config
from training.node.device import DeviceError, device
from training.recipe.recipe import RecipeError
from training.recipe.tables import NF4
from training.text.catalogue import EMPTY_ANSWER
from training.text.files import ADAPTER_CONFIG
from training.text.problems import AdapterError

BASE, TUNED = "base", "tuned"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_base(model_dir: Path, adapter: Path | None = None) -> Any:
    """A base model in its own dtype, or in four bits where `adapter` was trained beside those; on the first GPU or
    where there is none on the CPU. Raises AdapterError."""
    read_config(model_dir)
    check_weights_match_config(model_dir)
    try:
        mine = device()
    except DeviceError as error:
        raise AdapterError(str(error)) from error
    if dtype := packed_in(adapter):
        model = _in_four_bits(model_dir, dtype)
    else:
        model = architecture.load(architecture.config_of(model_dir), model_dir, dtype="auto")
    stretch_as_trained(model, adapter or model_dir)
    return model.to(mine).eval()


def stretch_as_trained(model: Any, tuned: Path | None) -> None:
    """By the max_length of the run that an adapter or a whole model is of, where something beside it says so."""
    recipe = trainer_state(tuned).get("recipe")
    length = recipe.get("max_length") if isinstance(recipe, dict) else None
    if isinstance(length, int):
        architecture.stretch_for(model, length)


def packed_in(adapter: Path | None) -> torch.dtype | None:
    """What the run of an adapter computed with, where its base lay in four bits; None where it did not, or where
    nothing beside the adapter says so."""
    recipe = trainer_state(adapter).get("recipe")
    if not isinstance(recipe, dict) or recipe.get("base_precision") != NF4:
        return None
    if recipe.get("dtype") not in DTYPES:
        raise AdapterError(f"{adapter} was trained with dtype {recipe.get('dtype')!r}; known: {', '.join(DTYPES)}")
    return DTYPES[recipe["dtype"]]


def _in_four_bits(model_dir: Path, dtype: torch.dtype) -> Any:
    from training.node import nf4  # bitsandbytes is slow to import

    try:
        return nf4.load(nf4.ready(model_dir, dtype), model_dir, dtype=dtype)
    except RecipeError as error:
        raise AdapterError(str(error)) from error


def with_adapter(model: Any, model_dir: Path, adapter: Path) -> Any:
    """A model with an adapter beside its weights; AdapterError where it was trained on another one."""
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{adapter} holds no adapter in PEFT's format")
    refuse_other_base(model_dir, adapter)
    refuse_not_finite(adapter)
    config = in_modules(LoraConfig.from_pretrained(str(adapter)))
    tuned = PeftModel.from_pretrained(model, adapter, config=config, autocast_adapter_dtype=False).eval()
    if dtype := packed_in(adapter):
        from training.node import nf4

        nf4.in_one_dtype(tuned, dtype)
    return tuned


def is_whole(tuned: Path | None) -> bool:
    """Whether what a run learned is a model of its own, as full fine-tuning leaves it, and no adapter."""
    return tuned is not None and (tuned / "config.json").is_file()


def load_tuned(model_dir: Path, tuned: Path) -> Any:
    """The tuned model by itself: the base with an adapter, or a whole model. Raises AdapterError."""
    if not is_whole(tuned):
        return with_adapter(load_base(model_dir, tuned), model_dir, tuned)
    refuse_other_base(model_dir, tuned)
    refuse_not_finite(tuned)
    return load_base(tuned)


def speaking(model: Any, who: str) -> AbstractContextManager[Any]:
    """Within it a model with an adapter is the base, or is tuned."""
    return model.disable_adapter() if who == BASE and isinstance(model, PeftModel) else contextlib.nullcontext()


def reader(model: Any) -> Forward:
    """Reads tokens with the model, remembering those before."""
    cache = DynamicCache(config=model.config)

    def forward(ids: Sequence[int]) -> torch.Tensor:
        inputs = torch.tensor([list(ids)], device=model.device)
        with torch.inference_mode():
            out = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    return forward


SHOWN_EVERY = 4
"""Tokens between two looks at a growing answer."""


class Pair:
    """A base model and, with an adapter, the tuned one: the same weights, the adapter switched off and on. A whole
    tuned model lies beside its base."""

    def __init__(self, model_dir: Path, adapter: Path | None, template_args: Mapping[str, Any] | None = None) -> None:
        self.voice = Voice.of(model_dir, template_args)
        tuned = load_tuned(model_dir, adapter) if adapter is not None else None
        base = load_base(model_dir) if tuned is None or is_whole(adapter) else tuned
        self.models: dict[str, Any] = {BASE: base} if tuned is None else {BASE: base, TUNED: tuned}
        self.names = tuple(self.models)

    def growing(self, who: str, question: Question, sampling: Sampling) -> Iterator[str]:
        """The answer, longer and longer; the last one is whole."""
        ids: list[int] = []
        with speaking(self.models[who], who):
            prompt = self.voice.prompt(question)
            chooser = Chooser(self.voice, prompt, sampling)
            for token in self.voice.answer(reader(self.models[who]), chooser, prompt, sampling):
                ids.append(token)
                if len(ids) % SHOWN_EVERY == 0:
                    yield self.voice.text(ids)
        yield self.voice.text(ids)

    def answer(self, who: str, question: Question, sampling: Sampling) -> str:
        """The whole answer."""
        *_, last = self.growing(who, question, sampling)
        return last


Answer = Callable[[str, Question, Sampling], str]
"""What the base, or the tuned model, by its name, says to a question."""


def answers(
    names: Sequence[str], answer: Answer, questions: Sequence[Question], sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """One {"prompt", "messages", "base", "tuned"} a question; tuned is None without an adapter."""
    for question in questions:
        replies = {who: answer(who, question, sampling) for who in names}
        messages = list(question_of(question).turns)
        yield {"prompt": messages[-1]["content"], "messages": messages, BASE: replies[BASE], TUNED: replies.get(TUNED)}


def serve(pair: Pair, sampling: Sampling) -> None:
    """Answer each line {"base": question, "tuned": question} with lines {"who", "text", "done"}."""
    lines: Queue[str] = Queue()
    attached.tell(ready=list(pair.names))
    attached.end_with_input(lines.put)
    while True:
        request = json.loads(lines.get())
        for who in pair.names:
            text = ""
            try:
                for text in pair.growing(who, request[who], sampling):
                    attached.tell(who=who, text=text, done=False)
            except AdapterError as error:
                text = f"({error})"
            attached.tell(who=who, text=text, done=True)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, help="an adapter's folder, in PEFT's format, or a whole tuned model's")
    parser.add_argument("--prompt", action="append", default=[], help="what to ask; may be repeated")
    parser.add_argument("--prompts", type=Path, help="a file of records; their last answers are left out")
    parser.add_argument("--serve", action="store_true", help="answer conversations from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=Sampling.max_new_tokens)
    parser.add_argument("--temperature", type=float, default=Sampling.temperature, help="0: always the likeliest")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=Sampling.seed)
    parser.add_argument(
        "--template-args", type=json.loads, default={}, help="JSON: what the run gave the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON lines")
    parser.add_argument("--attached", action="store_true", help="JSON lines, and end with standard input")
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    questions = from_prompts(args.prompt) + (read_questions(args.prompts) if args.prompts else [])
    if not questions and not args.serve:
        raise AdapterError("say what to ask: --prompt TEXT, --prompts FILE or --serve")
    if args.attached:
        attached.end_with_input()
    pair = Pair(args.model, args.adapter, args.template_args)
    if pair.voice.note:
        attached.tell(note=pair.voice.note)
    if args.serve:
        serve(pair, sampling)
    for answer in answers(pair.names, pair.answer, questions, sampling):
        if args.attached:
            attached.tell(answer=answer)
        elif args.json:
            attached.tell(**answer)
        else:
            print(f"\n> {answer['prompt']}\n  base   {answer[BASE] or EMPTY_ANSWER}")
            if answer[TUNED] is not None:
                print(f"  tuned  {answer[TUNED] or EMPTY_ANSWER}", flush=True)


def main() -> int:
    all_imported()
    args = _parsed()
    return attached.run(lambda: work(args), args.attached or args.serve)


if __name__ == "__main__":
    sys.exit(main())
