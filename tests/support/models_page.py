"""The tables of docs/models.md, from the recipes and from what the tests try. `python -m tests.support.models_page`
writes them; tests/test_training_new_recipe.py holds the page against them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.cost.shape import added_outlines, known_shape
from training.cost.strategies.pipeline import SPLITTABLE
from training.isolation import (
    DENSE,
    HYBRIDS,
    MIXTURES,
    PADDED_ALONE,
    READ_AS_EXPERTS,
    UNTRAINABLE,
    WRAPPERS,
)
from training.model_names import load_recipe, recipe_names

GROUPS = {"dense": DENSE, "mixture of experts": MIXTURES, "hybrid": HYBRIDS, "sees images too": WRAPPERS}
PROOFS = ("packed", "padded", "apart", "gradients", "merged", "counted", "zero3")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """\
# Which models

`--model` takes a recipe: its name, a short one (`qwen3:8b`, `Llama-3.1-8B`) or the id of its base model on the Hub
(`Qwen/Qwen3-8B`). Another model of a type below is taken by its id too: the recipe is derived from what the Hub (or
the hub of [mirrors] in cluster.toml, or of HF_ENDPOINT) says of it, counted, its type proved on a small copy, and
shown. `fab models.add OWNER/NAME` writes it into [training/recipes](../training/recipes), to edit. The base
deploy fetches what `[models] names` in cluster.toml lists, by recipe or by id.

The models below are rows of [models.toml](../training/models.toml), with notes on each; their recipes are derived from
their shapes. `fab models.add NAME` writes the recipe of one into training/recipes, to edit. A file there wins over the
row of the same name.

A folder is enough too: `fab train --model ./my-model --data FILE` derives the recipe from its config.json, and shows
it. With `--here` it is read where it is. For the nodes name it in `[models] names` as well (`names = ["./my-model"]`):
the base deploy sends it to the first node, whole files, what lies there already not again, and copies it to the others.
The folder stays as it is.

Before anything starts, the headers of the folder's weight files are compared with its config.json, by transformers'
own loader without any values. These are refused, each in one sentence: a tensor that is missing, has another shape or
would be left out; a cut file, a Git LFS pointer, an index without its file; model.safetensors beside shards; pickles
(.bin), GGUF, an adapter, a folder without tokenizer.json. The ranks, `fab generate`, `fab evaluate` and `fab merge`
compare again. A folder without a chat template takes only prompts and completions; a chat_template.jinja in it is its
template. gpt2, bloom, rwkv and falcon, whose parts have other names, are not trained.

Counting and proving take torch: this machine's (`pip install -e '.[train]'`), else the head's, which is sent
config.json and the shapes of the tensors. Without either a model that no recipe is shipped for is planned, trained or
added after `fab up` and the base deploy. `fab data` counts no model.

The comment of a derived recipe says what ends an answer, what fills rows up and which modules LoRA adapts, by the
model's tokenizer_config.json and its layers; and where generation_config.json does not stop at the template's end of
turn, as with a base model, what a start on conversations will ask for.

## Recipes

Memory is computed: zero3, every layer computed again, 2,048 tokens. An id that is *unverified* is what its maker
publishes, its licence too, and was never fetched by these recipes' authors; your first fetch writes its commit into
models.lock.
"""
TYPES = """\
## Types

The value of `model_type` in config.json. A type is admitted when a small model of it with random weights passes every
proof, in the tests: `packed`, `padded`: the loss and logits of samples in one row, or in rows of their own, are those
of each alone, windows shorter than the samples, caps and sinks included. `apart`: another first sample changes nothing
of the others. `gradients`: every trained parameter gets a gradient, and no router is trained. `merged`: merged into the
weights the adapter says the same. `counted`: parameters are as many as the plan reckons with. `zero3`: on one rank and
on two it learns what one plain rank does, the gradient of each tensor within 1e-5 of it. `packed` and the logits are
tried again on a thin copy of your model before each run. `gemma4` and `gemma4_text` passed twice: with experts
(26B-A4B) and without.

For a model of the Hub that no recipe is shipped for they are tried again, on a small copy of its own config.json, whose
heads are as wide as the model's: all but `zero3`, whenever a start derives its recipe and by `fab models.add`, which
writes nothing where one fails. Each must be below 1e-5 there too; `packed`, `padded`, `apart` and `merged` are
tried in 64 bits where 32 round somewhat more than that, and of Gemma 4's wide copies, which round to 3e-5 and in part
compute in 32 bits always, `packed` and `padded` need be below 1e-4 alone.

"""


def _types_named(kinds: Sequence[str]) -> str:
    *others, last = [f"`{kind}`" for kind in kinds]
    return f"{', '.join(others)} and {last}"


def _refused() -> str:
    """The types that are known not to be exact, by why."""
    lines = []
    for kinds, how in ((UNTRAINABLE, "not trained"), (PADDED_ALONE, "padded alone, from a folder of yours")):
        for reason in dict.fromkeys(kinds.values()):
            names = ", ".join(f"`{kind}`" for kind in sorted(kinds) if kinds[kind] == reason)
            lines += textwrap.wrap(f"- {names}: {how}; {reason}.", 120, subsequent_indent="  ")
    return "\n".join(lines)


def _read_as_experts() -> str:
    """What is said of the types whose other modules PEFT takes for experts."""
    return textwrap.fill(
        f"- In {_types_named(sorted(READ_AS_EXPERTS))} PEFT takes modules called `gate_proj`, `up_proj` or `down_proj` "
        "for routed experts. Those of shared experts and dense layers are named by their weights instead "
        "(`target_parameters` in adapter_config.json), which PEFT loads and merges, and for which it has neither "
        "`lora.dropout` nor `lora.dora`. Outside of four bits it makes W + B A of each in every forward: merge before "
        "you ask it much (`merge_and_unload`, `fab merge`); training and `fab generate` do not.",
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


REST = f"""
- Caps on scores (`gemma2`) and sinks (`gpt_oss`, `mimo_v2_flash`, `granite_swa`) are computed by plain products, some
  queries at a time and again in backward, since no kernel of torch gives them their gradient: slower.
- A mixture of experts learns in its attention, its shared experts and its dense layers; routed experts too with
  `lora.experts = true` ([training.md](training.md#experts-of-a-mixture)), routers never. In NF4 its experts lie in four
  bits too. `tuning = "full"` is refused there: its routers would drift.
{_read_as_experts()}
- `all-linear` leaves out `out_proj` of the mixers of `bamba`, `falcon_h1`, `granitemoehybrid`, `nemotron_h` and
  `jamba`, and `jamba`'s `dt_proj`: they hand these weights to a kernel, which no adapter takes part in. A recipe that
  names them is refused.
- A hybrid's layers with a convolution or a state are called once a sample: exact, without compiled kernels, and slower.
  Where `flash-linear-attention` and `causal-conv1d` (or `mamba-ssm`) are installed on the nodes, a packed run tries
  them before it begins, on a small copy on its own card: a row in one call, told where its samples begin, against
  sample by sample, value and gradient. Where both agree the run takes rows in one call, and says so; else it says why
  not. The base deploy installs none of them, and no card has tried them yet. The states of such layers (Qwen3.5,
  Qwen3.6) are memory that no plan counts; `fab plan` says so below its table.
{_refused()}
- A folder of yours of another type trains with `--set batching=padded`, where the copy shows that the logits are the
  model's own. Of the Hub's models those of the types above are taken alone.
- Of a model that sees images too the text part is trained, on text alone: adapters lie below its layers, the rest is
  frozen and takes its memory (Gemma 3: 0.8 GB in 16 bits). In NF4 the text part's layers lie in four bits, the rest in
  16. `tuning = "full"` and pipelines are refused there. Other such types, and files stored in 8 bits (Ministral 3's
  Instruct; take those in 16), are refused.
- Its adapter has the names of the class that its files are of, and adapter_config.json names that class
  (`auto_mapping`, in place of a `task_type`): PEFT's `AutoPeftModelForCausalLM` and `AutoPeftModel` load it with its
  base. By hand the base comes first, of its own class:

  ```python
  base = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen3.5-4B")
  model = PeftModel.from_pretrained(base, "runs/RUN_ID/adapter")
  ```

  Never `AutoModelForCausalLM`: of a Qwen3.5 it builds the text part alone, under other names (`model.layers` for
  `model.language_model.layers`), where PEFT loads nothing of the adapter and only warns. A server that takes the
  adapter of such a model apart from its base goes by these names too; where one does not, serve what `fab merge`
  writes: it has the base's own names.
- A pipeline takes {_types_named(SPLITTABLE)}.
"""


def page() -> str:
    """The whole of it."""
    return "\n".join([HEAD, *_recipes(), "", TYPES + "\n".join(_types()), REST])


def row(kind: str) -> str:
    """Of a type that is admitted: it passed every proof."""
    group = next(name for name, kinds in GROUPS.items() if kind in kinds)
    return f"| `{kind}` | {group} |{' yes |' * len(PROOFS)}"


def shown(kind: str) -> dict[str, bool]:
    """What the page says that a type passed, by proof."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    marks = next(line.split(" | ")[2:] for line in lines if line.startswith(f"| `{kind}` |"))
    return {name: mark.strip(" |") == "yes" for name, mark in zip(PROOFS, marks, strict=True)}


def _types() -> Iterator[str]:
    yield f"| type | kind | {' | '.join(PROOFS)} |"
    yield "|---|---|" + "---|" * len(PROOFS)
    for kinds in GROUPS.values():
        yield from map(row, sorted(kinds))


def _recipes() -> Iterator[str]:
    yield "| recipe | base model | licence | type | billion parameters | GPU memory | id |"
    yield "|---|---|---|---|---|---|---|"
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.base_model in added_outlines():
            continue
        shape = known_shape(recipe.base_model)
        assert shape is not None
        known = "made here" if name == "tiny" else "unverified"
        memory, _, _ = recipe.about.partition(", ")
        size = f"{shape.parameters / 1e9:.3g}"
        licence = recipe.licence or "-"
        yield f"| {name} | {recipe.base_model} | {licence} | {shape.kind} | {size} | {memory} | {known} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
