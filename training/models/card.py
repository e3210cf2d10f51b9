"""The model card of an adapter or a merged model: where it comes from, how good it is, how to load it.

It is written into each checkpoint before that is sealed, so it is verified wherever it comes to.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.models.lock import COMMIT
from training.recipe.base import Base, BaseKind
from training.recipe.recipe import Recipe
from training.recipe.tables import NF4
from training.run.checkpoint_files import FetchError, whole_tensors
from training.run.evaluations import measured_on, read_evaluations
from training.run.folder import LAUNCH, LOCAL_RUNS, METRICS, MODEL_SUMS, RECIPE, parse_metrics, run_of
from training.run.history import stages_of
from training.text.catalogue import ENGLISH, Say
from training.text.counts import many
from training.text.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    STATE,
    TOKENIZER,
    bounded_json,
    copy_files,
    object_in,
    parse_sums,
    read_origin,
)
from training.text.problems import AdapterError

TINY_LIES = "replace path/to with the full path of ~/.cache/spotune/models; fab train --model tiny --here makes it"
"""Where the base of `tiny` is on the reader's machine, which no hub has."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What its --max-lora-rank takes."""
LICENCES = ("apache-2.0", "mit", "gemma", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4")
"""Of base models, those that the hub knows by themselves; others are told as `other` with their name."""


def base_name(base: Base) -> str:
    """A base model as others may know it: the path of a folder on this machine is nobody's business; of what a run
    merged its id."""
    if not (folder := base.folder):
        return base.name
    return f"{_merged_by(base)}-{folder.name}" if _merged_by(base) else folder.name


def _merged_by(base: Base) -> str:
    """The run whose folder the base model lies in; empty for any other one."""
    return run_of(base.folder) if base.folder else ""


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
    evaluations: Sequence[Mapping[str, Any]]
    """Of its validation split, then of other data."""
    merged: bool
    end_of_turn: str = ""
    """The token it was taught to end an answer with; empty where it was taught none."""
    sees: bool = False
    """Whether its base model sees images too."""
    data: Mapping[str, int] = field(default_factory=dict)
    """How many of what it learned from, by their names."""
    began_with: Sequence[str] = ()
    """The adapters it began with, the first one first."""
    here: bool = False
    """Whether it was made on the user's own machine, and no head has it."""
    base_weights: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the base's files of weights, by their names."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe's values."""
        return tomllib.loads(self.recipe_text)

    @property
    def base(self) -> Base:
        """What it was made from."""
        return Base.parse(str(self.recipe["base_model"]))


def card(name: str, facts: CardFacts, *, published: bool = False) -> str:
    """README.md: front matter the hub reads, then words. `name`: what it is loaded by, a repository or a folder. The
    licence is the base model's, which binds both. `published`: for others than who has the base's folder here."""
    recipe = facts.recipe
    base = facts.base
    front = [f"base_model: {base}"] if base.on_hub else []
    front += _licence(str(recipe.get("licence", "")))
    front += [f"library_name: {'transformers' if facts.merged else 'peft'}", "pipeline_tag: text-generation"]
    front += ["tags:", "- lora", "- spotune"]
    kind = "A model with its LoRA adapter merged in" if facts.merged else "A LoRA adapter"
    of = f"[{base}](https://huggingface.co/{base})" if base.on_hub else base_name(base)
    lines = ["---", *front, "---", "", f"# {name}", "", f"{kind}, fine-tuned from {of} with spotune.", ""]
    lines += ["| | |", "|--|--|", f"| run | {facts.run_id}, step {facts.step} |"]
    lines += [f"| began with | {each} |" for each in facts.began_with]
    lines += [
        f"| base model's files, sha256 | {facts.base_model_hash} |",
        f"| data as prepared, sha256 | {facts.data_hash} |",
    ]
    if facts.data:
        lines.append(f"| learned from | {', '.join(f'{count:,} {what}' for what, count in facts.data.items())} |")
    if recipe.get("base_precision") == NF4:
        lines += ["| base model while training | its layers in four bits a weight (NF4) |"]
    losses_so_far = (("final training loss", facts.final_loss), ("lowest validation loss", facts.validation_loss))
    lines += [f"| {label} | {value:.4f} |" for label, value in losses_so_far if value is not None]
    code, serve = loading(name, facts, at_hand=facts.here and not published)
    lines += [
        "",
        "Licence: that of the base model.",
        *(line for each in facts.evaluations for line in _evaluation(each)),
        *("", "## Use", "", "```python", *code, "```", "", "```sh", *serve, "```"),
        *_asked(facts),
        *_end(facts),
        "",
    ]
    text = facts.recipe_text.strip()
    text = text.replace(str(base), base_name(base)) if base.folder else text
    return "\n".join([*lines, "## Recipe", "", "```toml", text, "```", ""])


def _licence(named: str) -> list[str]:
    """As the hub takes it, which refuses a card with another identifier than those it knows."""
    if not named:
        return []
    if named in LICENCES:
        return [f"license: {named}"]
    return ["license: other", *([f"license_name: {json.dumps(named)}"] if named != "other" else [])]


def _evaluation(evaluation: Mapping[str, Any]) -> list[str]:
    if not evaluation.get("tuned"):
        return []
    base, tuned = evaluation["base"], evaluation["tuned"]
    known = ("loss", "perplexity", "exact_match", "rouge_l", "pair_accuracy", "pair_margin")
    keys = [key for key in known if tuned.get(key) is not None]
    rows = [f"| {key.replace('_', ' ')} | {base[key]:.4f} | {tuned[key]:.4f} |" for key in keys]
    of, learned = measured_on(evaluation), evaluation.get("learned_before")
    what = f"of {of}, {learned} of them trained on" if learned else f"of {of}" if of else "held out"
    title = f"On {many(tuned['samples'], 'record')} {what}, each model loaded by itself:"
    return ["", title, "", "| | base | tuned |", "|--|--|--|", *rows]


def loading(
    name: str, facts: CardFacts, say: Say = ENGLISH, *, at_hand: bool | None = None
) -> tuple[list[str], list[str]]:
    """Python that loads it with transformers and PEFT, and merges it; the command that has vLLM serve it. The base is
    named where it sees images, and where no hub has it."""
    base = facts.base
    at_hand = facts.here if at_hand is None else at_hand
    kind = "AutoModelForImageTextToText" if facts.sees else "AutoModelForCausalLM"
    local, run_id = not base.on_hub, _merged_by(base)
    merged_here = f"{LOCAL_RUNS}/{run_id}/{Path(base.name).name}" if at_hand and run_id else ""
    served = merged_here or (f"path/to/{base_name(base)}" if local else base.name)
    lies = TINY_LIES if base.kind is BaseKind.BUILT_IN else "path/to: wherever the folder of the base lies"
    where = [f"# {say(lies)}"] if local and not merged_here else []
    if facts.merged:
        code = [f"from transformers import {kind}", f"model = {kind}.from_pretrained({_python(name)})"]
        serve = [shlex.join(["vllm", "serve", name])]
    else:
        own = f"PeftConfig.from_pretrained({_python(name)}).base_model_name_or_path"
        code = [f"from peft import AutoPeftModelForCausalLM{', PeftConfig' * local}", *_same_base(own, facts)]
        code += [f"model = AutoPeftModelForCausalLM.from_pretrained({_python(name)})"]
        if facts.sees or (local and not at_hand):
            code = ["from peft import PeftModel", f"from transformers import {kind}"]
            code += [*where, *_same_base(_python(served), facts)]
            code += [f"base = {kind}.from_pretrained({_python(served)})"]
            code += [f"model = PeftModel.from_pretrained(base, {_python(name)})"]
        code.append(f"model = model.merge_and_unload()  # {say('a plain model, where one is wanted')}")
        rank = _served_rank(facts.recipe["lora"])
        if local:
            code += _without_base(facts, kind, say)
        room = ["--max-lora-rank", str(rank), "--lora-modules", f"tuned={name}"]
        command = shlex.join(["vllm", "serve", served, "--enable-lora", *room])
        serve = (
            [*where, command]
            if rank
            else [f"# {say('vLLM serves no such adapter: merge it, and serve the merged model')}"]
        )
    return code, serve


def _same_base(folder: str, facts: CardFacts) -> list[str]:
    """What refuses another base, of one that no hub has: with that an adapter gives garbage without a word."""
    if facts.base.on_hub or not facts.base_weights:
        return []
    return [
        "from hashlib import file_digest",
        "from pathlib import Path",
        f"for file, digest in {json.dumps(dict(facts.base_weights))}.items():",
        f"    found = file_digest((Path({folder}) / file).open('rb'), 'sha256').hexdigest()",
        '    assert found == digest, f"{file} is not of the base that the adapter was trained on"',
    ]


def _python(text: str) -> str:
    """A Python string of it: JSON's escapes are Python's too."""
    return json.dumps(text, ensure_ascii=False)


def _without_base(facts: CardFacts, kind: str, say: Say) -> list[str]:
    """How it is loaded where the base's folder is not at hand, and no hub has it."""
    merge, merged = (
        f"fab merge --run {facts.run_id} {'--here' if facts.here else '--fetch'}",
        f"{LOCAL_RUNS}/{facts.run_id}/merged",
    )
    return [
        "",
        f"# {say('no hub has the base; without its folder: {command}, then', command=merge)}",
        f"# from transformers import {kind}",
        f"# model = {kind}.from_pretrained({_python(merged)})",
    ]


def _served_rank(lora: Mapping[str, Any]) -> int | None:
    """The smallest of the ranks that vLLM makes room for; None where it knows no such adapter."""
    if lora.get("dora") or lora.get("modules_to_save") or lora.get("trainable_tokens"):
        return None
    return next((rank for rank in VLLM_RANKS if rank >= int(lora.get("rank", 16))), None)


def _asked(facts: CardFacts) -> list[str]:
    args = facts.recipe.get("template_args")
    if not args:
        return []
    arguments = ", ".join(f"{name}={value!r}" for name, value in args.items())
    return ["", f"It was taught to answer what `apply_chat_template(..., {arguments})` asks; ask it so."]


def _end(facts: CardFacts) -> list[str]:
    if not facts.end_of_turn:
        return []
    also = "its generation_config.json says so" if facts.merged else "generate with that as `eos_token_id`"
    return ["", f"An answer ends with `{facts.end_of_turn}`; {also}."]


# What a run's folder says about one of its checkpoints, for its model card: at home, and where it is written.

COUNTS = {"records": "records", "samples": "samples", "tokens": "tokens", "learned_tokens": "learned tokens"}
"""Of a data report, as the card calls them."""


def read_facts(run: Path, checkpoint: Path, merged: bool) -> CardFacts:
    """What the folder of a run says of the checkpoint. AdapterError where one of the two is not whole."""
    try:
        state = bounded_json((checkpoint / STATE).read_text(encoding="utf-8"))
        recipe = (run / RECIPE).read_text(encoding="utf-8")
        metrics = (run / METRICS).read_bytes() if (run / METRICS).exists() else b""
    except OSError as error:
        raise AdapterError(f"{run} is not a whole fetched run: {error}") from error
    final_loss, validation_loss = losses(metrics, state["step"])
    report: dict[str, Any] = object_in(run / "data" / "report.json").get("report", {})
    return CardFacts(
        run_id=run.name,
        step=state["step"],
        recipe_text=recipe,
        base_model_hash=state["base_model"],
        data_hash=state["data"],
        final_loss=final_loss,
        validation_loss=validation_loss,
        evaluations=read_evaluations(run),
        merged=merged,
        end_of_turn=str(report["end_of_turn"]) if report.get("end_of_turn_learned") else "",
        sees=_sees(checkpoint / "adapter" / ADAPTER_WEIGHTS),
        began_with=[stage.words for stage in stages_of(run)],
        here=object_in(run / LAUNCH).get("here") is True,
        base_weights=_base_weights(run / MODEL_SUMS),
        data={name: report[key] for key, name in COUNTS.items() if report.get(key)},
    )


def losses(metrics: bytes, step: int) -> tuple[float | None, float | None]:
    """Training loss of the last step up to `step`, and the lowest validation loss until then, of a metrics.jsonl."""
    rows = [row for row in parse_metrics(metrics)[0] if row.get("step", 0) <= step]
    trained = [row["loss"] for row in rows if row.get("loss") is not None]
    validated = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return (trained[-1] if trained else None), min(validated, default=None)


def _base_weights(sums: Path) -> dict[str, str]:
    """Those of a base model's SHA256SUMS; nothing where the run has none that can be read."""
    try:
        digests = parse_sums(sums.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}


def _sees(weights: Path) -> bool:
    """Whether an adapter is of a text part beside others, by the names in it."""
    try:
        return any(".language_model." in name for name in whole_tensors(weights)[0])
    except (OSError, FetchError):  # what is damaged is told when it is verified
        return False


# What lets others use a checkpoint's adapter: its base model by the name they know, the tokenizer, a model card.
#
# It is written before the checkpoint is sealed, so all of it is verified wherever it comes to. Rank 0 alone.


def complete(part: Path, run: Path, recipe: Recipe, model_dir: Path) -> None:
    """Into `part`, the folder of an adapter or of a whole model in a checkpoint that has its weights, its configuration
    and its state already."""
    copy_files(model_dir, part, TOKENIZER)
    if (part / ADAPTER_CONFIG).is_file():
        name_base(part / ADAPTER_CONFIG, recipe, model_dir)
        where = f"{LOCAL_RUNS}/{run.name}/{part.name}"
        (part / "README.md").write_text(card(where, read_facts(run, part.parent, merged=False)), encoding="utf-8")


def name_base(config_file: Path, recipe: Recipe, model_dir: Path) -> None:
    """In an adapter's configuration the base model as others load it: its id on the Hub with the commit that was
    fetched, or the folder the user named."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    base, revision = recipe.base_model.name, None
    if recipe.base_model.kind is BaseKind.BUILT_IN:
        base = str(model_dir)
    elif recipe.base_model.on_hub:
        commit = str(read_origin(model_dir).get("commit", ""))
        revision = commit if COMMIT.fullmatch(commit) else recipe.revision
    text = json.dumps({**config, "base_model_name_or_path": base, "revision": revision}, indent=2, sort_keys=True)
    config_file.write_text(text, encoding="utf-8")
