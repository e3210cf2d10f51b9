"""What a stranger reads about a published adapter: where it comes from and how good it is. Pure."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.cost.memory import NF4
from training.cost.shape import FOLDER
from training.model_lock import LOCAL


def base_name(base: str) -> str:
    """A base model as others may know it: the path of a folder on this machine is nobody's business."""
    return base.rpartition("/")[2] if base.startswith(FOLDER) else base


@dataclass(frozen=True)
class CardFacts:
    """What a run's folder says about its adapter."""

    run_id: str
    step: int
    recipe_text: str
    base_model_hash: str
    data_hash: str
    final_loss: float | None
    validation_loss: float | None
    """The lowest one."""
    evaluation: Mapping[str, Any] | None
    merged: bool
    end_of_turn: str = ""
    """The token it was taught to end an answer with; empty where it was taught none."""
    sees: bool = False
    """Whether its base model sees images too."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's values."""
        return tomllib.loads(self.recipe_text)


def losses(metrics: str) -> tuple[float | None, float | None]:
    """Last training loss and lowest validation loss of a metrics.jsonl."""
    rows = [json.loads(line) for line in metrics.splitlines() if line.strip()]
    trained = [row["loss"] for row in rows if "loss" in row]
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return (trained[-1] if trained else None), min(validated, default=None)


def card(name: str, facts: CardFacts) -> str:
    """README.md: front matter the hub reads, then words. The licence is the base model's, which binds both."""
    recipe = facts.recipe
    base = recipe["base_model"]
    known = not base.startswith(LOCAL)
    front = [f"base_model: {base}"] if known else []
    front += [f"library_name: {'transformers' if facts.merged else 'peft'}", "pipeline_tag: text-generation"]
    front += ["tags:", "- lora", "- spotune"]
    kind = "A model with its LoRA adapter merged in" if facts.merged else "A LoRA adapter"
    of = f"[{base}](https://huggingface.co/{base})" if known else base_name(base)
    lines = ["---", *front, "---", "", f"# {name}", "", f"{kind}, fine-tuned from {of} with spotune.", ""]
    lines += ["| | |", "|--|--|", f"| run | {facts.run_id}, step {facts.step} |"]
    lines += [f"| base model's files, sha256 | {facts.base_model_hash} |", f"| data, sha256 | {facts.data_hash} |"]
    if recipe.get("base_precision") == NF4:
        lines += ["| base model while training | its layers in four bits a weight (NF4) |"]
    lines += [f"| {label} | {value:.4f} |" for label, value in _numbers(facts) if value is not None]
    lines += [
        "",
        "Licence: that of the base model.",
        *_evaluation(facts),
        *_use(name, facts),
        *_asked(facts),
        *_end(facts),
        "",
    ]
    return "\n".join(
        [*lines, "## Recipe", "", "```toml", facts.recipe_text.strip().replace(base, base_name(base)), "```", ""]
    )


def _numbers(facts: CardFacts) -> list[tuple[str, float | None]]:
    return [("final training loss", facts.final_loss), ("lowest validation loss", facts.validation_loss)]


def _evaluation(facts: CardFacts) -> list[str]:
    if not facts.evaluation or not facts.evaluation.get("tuned"):
        return []
    base, tuned = facts.evaluation["base"], facts.evaluation["tuned"]
    known = ("loss", "perplexity", "exact_match", "rouge_l", "pair_accuracy", "pair_margin")
    keys = [key for key in known if tuned.get(key) is not None]
    rows = [f"| {key.replace('_', ' ')} | {base[key]:.4f} | {tuned[key]:.4f} |" for key in keys]
    title = f"On {tuned['samples']} records held out, each model loaded by itself:"
    return ["", title, "", "| | base | tuned |", "|--|--|--|", *rows]


def _use(name: str, facts: CardFacts) -> list[str]:
    kind = "AutoModelForImageTextToText" if facts.sees else "AutoModelForCausalLM"
    if facts.merged:
        code = [f"from transformers import {kind}", f'model = {kind}.from_pretrained("{name}")']
    elif facts.sees:
        base = base_name(facts.recipe["base_model"])
        code = ["from peft import PeftModel", f"from transformers import {kind}"]
        code += [f'base = {kind}.from_pretrained("{base}")', f'model = PeftModel.from_pretrained(base, "{name}")']
    else:
        code = ["from peft import AutoPeftModelForCausalLM"]
        code += [f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")']
    return ["", "## Use", "", "```python", *code, "```"]


def _asked(facts: CardFacts) -> list[str]:
    args = facts.recipe.get("template_args")
    if not args:
        return []
    given = ", ".join(f"{name}={value!r}" for name, value in args.items())
    return ["", f"It was taught to answer what `apply_chat_template(..., {given})` asks; ask it so."]


def _end(facts: CardFacts) -> list[str]:
    if not facts.end_of_turn:
        return []
    also = "its generation_config.json says so" if facts.merged else "generate with that as `eos_token_id`"
    return ["", f"An answer ends with `{facts.end_of_turn}`; {also}."]
