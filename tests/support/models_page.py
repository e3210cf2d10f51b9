"""The tables of docs/models.md, from the recipes and from what the tests try. `python -m tests.support.models_page`
writes them; tests/training/models/test_new_recipe.py holds the page against them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.cost.pipeline import SPLITTABLE
from training.cost.shape import ModelShape, added_outlines, known_shape
from training.models.derive import NUMBERS, gigabytes, needs
from training.models.names import load_recipe, recipe_names
from training.recipe.model_types import DENSE, HYBRIDS, MIXTURES, PADDED_ALONE, READ_AS_EXPERTS, UNTRAINABLE, WRAPPERS
from training.recipe.recipe import Recipe

GROUPS = {"dense": DENSE, "mixture of experts": MIXTURES, "hybrid": HYBRIDS, "sees images too": WRAPPERS}
PROOFS = ("packed", "padded", "apart", "gradients", "merged", "counted", "zero3")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """\
# Models

```
fab models                                          # all recipes, and whether they fit on your machines
fab train --model qwen3-8b --data FILE              # a shipped model, by name
fab train --model ./my-model --data FILE            # a folder
fab models.add OWNER/NAME                           # another model on the Hub: write a recipe to edit
```

`--model` takes one of these:

- the name of a recipe below, in full or short (`qwen3:8b`, `Llama-3.1-8B`), or the id of its base model on the Hub
  (`Qwen/Qwen3-8B`);
- the id of any other model on the Hub, if its [type](#types) is supported. Its recipe is derived from the files on the
  hub (`[mirrors]` in cluster.toml, or HF_ENDPOINT), and its parameters are counted;
- a folder, see [below](#a-folder).

The base deploy downloads the models in `[models] names` of cluster.toml, by recipe or by id.

Shipped models are rows of [models.toml](../training/models.toml), with notes on each. Their recipes are derived from
these. `fab models.add NAME` writes a recipe into [training/recipes](../training/recipes), where you can edit it. A file
there takes precedence over the row of the same name. The comment of a derived recipe says which token ends an answer,
which token fills up rows, and which modules LoRA adapts. If generation_config.json does not stop at the template's end
of turn, as with base models, the comment says what a start on conversations will ask for.

Counting and testing need PyTorch, on this machine (`pip install -e '.[train]'`) or else on the head, which receives
only config.json and the shapes of the tensors. Without both, a model that is not shipped can be planned, trained or
added only after `fab up` and the base deploy. `fab data` needs no counting.

## A folder

`fab train --model ./my-model --data FILE` derives the recipe from the folder's config.json, and shows it. With
`--here`, the folder is read directly. For the nodes, also add it to `[models] names` (`names = ["./my-model"]`): the
base deploy sends it to the first node, skipping files that are already there, and copies it to the others. The folder
is never changed. Only weights, configuration, tokenizer and chat templates are read and hashed; the licence goes with
them, and other files in the folder do not matter.

Before anything starts, transformers' own loader compares the headers of the weight files with config.json, without
reading values. The ranks, `fab generate`, `fab evaluate` and `fab merge` compare again. Refused, each with a
one-sentence error:

- a tensor that is missing, has another shape or would be ignored;
- a truncated file, a Git LFS pointer, an index without its file, model.safetensors beside shards;
- pickles (.bin), GGUF, an adapter, a folder without tokenizer.json;
- gpt2, bloom, rwkv and falcon, whose modules have other names.

If the folder has no chat template, only prompt/completion data work; a chat_template.jinja in it is used.

## Recipes

The memory is computed for zero3, with all layers computed again and 2,048 tokens. *unverified*: id and licence are
those that the maker publishes, but the authors of these recipes never downloaded the model. Your first download writes
its commit into models.lock.
"""
TYPES = """\
## Types

The type is `model_type` in config.json. It is supported if a small model of this type with random weights passes all
proofs, in the tests:

- `packed`, `padded`: samples that share a row, or have a row each, get the same loss and logits as alone, also with
  sliding windows shorter than the samples, caps and sinks.
- `apart`: replacing the first sample does not change the others.
- `gradients`: each trained parameter gets a gradient, and no router is trained.
- `merged`: weights with the adapter merged in give the same result.
- `counted`: the model has as many parameters as the plan computes with.
- `zero3`: on one rank and on two it learns the same as one plain rank; the gradient of each tensor is within 1e-5.

`packed` and the logits are tested again before each run, on a thin copy of your model with heads as wide as its own.
`gemma4` and `gemma4_text` passed twice, with experts (26B-A4B) and without.

"""


def _types_named(kinds: Sequence[str]) -> str:
    *others, last = [f"`{kind}`" for kind in kinds]
    return f"{', '.join(others)} and {last}"


def _refused() -> str:
    """The types that are known not to be exact, by why."""
    lines = []
    for kinds, how in (
        (UNTRAINABLE, "not trained"),
        (PADDED_ALONE, "only from a folder of yours, with `--set batching=padded`"),
    ):
        for reason in dict.fromkeys(kinds.values()):
            names = ", ".join(f"`{kind}`" for kind in sorted(kinds) if kinds[kind] == reason)
            lines += textwrap.wrap(f"- {names}: {how}; {reason}.", 120, subsequent_indent="  ")
    return "\n".join(lines)


def _read_as_experts() -> str:
    """What is said of the types whose other modules PEFT takes for experts."""
    return textwrap.fill(
        f"- In {_types_named(sorted(READ_AS_EXPERTS))}, PEFT treats modules called `gate_proj`, `up_proj` or "
        "`down_proj` as routed experts. So the adapter names those of shared experts and dense layers by their weights "
        "(`target_parameters` in adapter_config.json). PEFT loads and merges these, but without `lora.dropout` and "
        "`lora.dora`. Except in four bits, PEFT computes W + B A of each in every forward pass. Merge the adapter "
        "before you use it a lot (`merge_and_unload`, `fab merge`). Training and `fab generate` do not have this cost.",
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


REST = f"""
## Notes on types

- Caps on scores (`gemma2`) and sinks (`gpt_oss`, `mimo_v2_flash`, `granite_swa`) are slower: no kernel of PyTorch gives
  them their gradient, so scores are computed by plain products for some queries at a time, and again in backward.
- Pipelines support {_types_named(SPLITTABLE)}.
- An unsupported type in a folder of yours can be trained with `--set batching=padded`, if the small copy shows that the
  logits are the model's own. From the Hub, only the types above are accepted.
{_refused()}

### Mixture-of-experts models

- LoRA adapts attention, shared experts and dense layers; routed experts too with `lora.experts = true`
  ([strategies.md](strategies.md#experts)). Routers stay frozen. With NF4, the experts are stored in four bits too.
- `tuning = "full"` is refused, because the routers would drift.
{_read_as_experts()}

### Hybrids

- `all-linear` leaves out `out_proj` of the mixers of `bamba`, `falcon_h1`, `granitemoehybrid`, `nemotron_h` and
  `jamba`, and `jamba`'s `dt_proj`. Their weights go directly to a kernel, which an adapter cannot change. A recipe that
  names them is refused.
- Layers with a convolution or a state run once per sample: exact, without compiled kernels, and slower.
- If `flash-linear-attention` and `causal-conv1d` (or `mamba-ssm`) are installed on the nodes, a packed run first tests
  them on its own card with a small copy: a whole row in one call, with the sample boundaries, against sample by sample,
  value and gradient. If both agree, the run computes rows in one call and says so. If not, it says why. The base deploy
  does not install these packages, and no card has tried them yet.
- The states of these layers (Qwen3.5, Qwen3.6) need memory that no plan counts; `fab plan` says so below its table.

### Models that also see images

- Only the text part is trained, on text. Adapters are below its layers; the rest is frozen and still takes memory
  (Gemma 3: 0.8 GB in 16 bits). With NF4, only the layers of the text part are stored in four bits.
- Refused: `tuning = "full"`, pipelines, other such types, and files stored in 8 bits (Ministral 3's Instruct; take the
  16-bit files).
- The adapter has the module names of the full class, and adapter_config.json names this class (`auto_mapping` instead
  of a `task_type`). PEFT's `AutoPeftModelForCausalLM` and `AutoPeftModel` load it with its base. To load them
  separately, load the base with its own class:

  ```python
  base = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen3.5-4B")
  model = PeftModel.from_pretrained(base, "runs/RUN_ID/adapter")
  ```

  Never use `AutoModelForCausalLM`. For Qwen3.5 it builds only the text part, with other names (`model.layers` instead
  of `model.language_model.layers`). PEFT then loads nothing of the adapter and only warns.
- Inference servers that load the adapter separately use these names too. If one does not, serve the merged model from
  `fab merge`, which has the base's own names.
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
        if str(recipe.base_model) in added_outlines():
            continue
        shape = known_shape(recipe.base_model)
        assert shape is not None
        known = "made here" if name == "tiny" else "unverified"
        memory = "1 GB of memory a rank" if name == "tiny" else _memory(recipe, shape)
        size = f"{shape.parameters / 1e9:.3g}"
        licence = recipe.licence or "-"
        yield f"| {name} | {recipe.base_model} | {licence} | {shape.kind} | {size} | {memory} | {known} |"


def _memory(recipe: Recipe, shape: ModelShape) -> str:
    """On as many GPUs as it may be divided among."""
    number, size = needs(recipe, shape)[0]
    count = {words: str(count) for count, words in NUMBERS.items()}.get(number, number)
    return f"at least {gigabytes(size)} GB a GPU on {count} GPU{'s' * (count != '1')}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
