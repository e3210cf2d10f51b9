"""Base model and data of the `tiny` recipe, made from docstrings that are shipped (tiny_text.json).

    python -m training.models.tiny DIR [--steps N]    a model of Qwen2.5's architecture, a million parameters

The model starts from random values and really reads the docstrings for a fixed number of steps (not
seconds, so that the same machine makes the same model: about a minute on one core), enough for words and
phrases, not for sense. What the records teach it is a manner: to answer with one sentence, quoted, and to say
where it is from; the base model goes on like some docstring. The modules HELD_OUT are in no record, to be asked
about afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY, POSITIONS = 2048, 1024
LIMITS = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
"""What config.json says of what the model can take."""
LENGTH, BATCH = 128, 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Qwen2.5's, without its tools."""

RECORDS = 400
ANSWER = 'The documentation says: "{}"'
"""What an answer looks like: nothing that reading docstrings would make a model say by itself."""
OFTEN = 99
"""Times that the tokenizer's training reads that: its words are tokens then, and the penalty leaves them whole."""
HELD_OUT = frozenset({"checkpoint", "lease", "network", "pace", "verify"})
TEXT = Path(__file__).with_name("tiny_text.json")
TEXT_SHA256 = "0d08f69946d266af2c6c010ee8f4e698f184e3cabf8bd02ff0e3f8f567611fec"


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """(dotted name, docstring) of functions and classes, the same under every Python. ValueError for other texts than
    this module's: it stands for the model that it makes."""
    content = TEXT.read_bytes()
    if hashlib.sha256(content).hexdigest() != TEXT_SHA256:
        raise ValueError(
            f"{TEXT} is not the text that tiny is made from: its sha256 is another than {TEXT_SHA256[:12]}"
        )
    return tuple((name, text) for name, text in json.loads(content)["texts"])


def questions() -> list[dict[str, Any]]:
    """Records in messages form: what does NAME do? Its docstring's first sentence, quoted."""
    records = []
    for name, text in docstrings():
        paragraph = " ".join(text.strip().split("\n\n", 1)[0].split())
        sentence = re.split(r"(?<=[.!?])\s(?=[A-Z])", paragraph, maxsplit=1)[0]
        if 20 <= len(sentence) <= 120 and sentence.endswith(".") and name.split(".")[0] not in HELD_OUT:
            turns = [{"role": "user", "content": f"What does {name} do?"}]
            records.append({"messages": [*turns, {"role": "assistant", "content": ANSWER.format(sentence)}]})
    if len(records) <= RECORDS:
        return records
    return [records[number * len(records) // RECORDS] for number in range(RECORDS)]  # spread over the alphabet


def preferences() -> list[dict[str, Any]]:
    """The same as pairs: an answer that quotes is preferred to the bare sentence."""
    pairs = []
    for record in questions():
        question, answer = record["messages"]
        bare = answer["content"].removeprefix(ANSWER[: ANSWER.index("{")]).removesuffix('"')
        rejected = {"role": "assistant", "content": bare}
        pairs.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    return pairs


def write_data(path: Path, goal: str = "sft") -> int:
    """Records for a goal of a recipe; gives how many."""
    records = preferences() if goal == "dpo" else questions()
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return len(records)


def tokenizer() -> Any:
    """The tokenizer that `write_model` gives the base model, as it is read from there: the class of the model's type
    splits words its own way. Needs no torch."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        _tokenizer([text for _, text in docstrings()]).save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def write_model(folder: Path, steps: int) -> float:
    """Make the base model at `folder`; gives the last loss."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    texts = [text for _, text in docstrings()]
    tokenizer = _tokenizer(texts)
    end, _, turn_end = tokenizer.convert_tokens_to_ids(SPECIAL)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=turn_end,
            pad_token_id=end,
        )
    )
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    loss = _read(model, torch.tensor([token for ids in encoded for token in (*ids, end)]), steps)
    model.generation_config = GenerationConfig(  # so small a model says one word for ever without the penalty
        bos_token_id=end, eos_token_id=[turn_end, end], pad_token_id=end, repetition_penalty=1.2
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def _tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE like Qwen2.5's, with its special tokens and chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [*texts, *[ANSWER] * OFTEN],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
    )


def _read(model: Any, stream: Any, steps: int) -> float:
    """Plain next-token training on random windows of the stream."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    generator = torch.Generator().manual_seed(0)
    loss = float("nan")
    for _ in range(steps):
        starts = torch.randint(len(stream) - LENGTH, (BATCH,), generator=generator)
        window = torch.stack([stream[start : start + LENGTH] for start in starts.tolist()])
        out = model(input_ids=window, labels=window)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        loss = out.loss.item()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--steps", type=int, default=500, help="how long the model reads (default 500)")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # on a busy machine two wait for each other ten times as long as one works
    print(f"{args.folder}: made, loss {write_model(args.folder, args.steps):.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
