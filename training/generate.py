"""Ask the base model, and the base model with an adapter, the same things; greedy, so the answers repeat.

python -m training.generate --model /data/models/NAME [--adapter DIR] --prompt TEXT [--prompt TEXT] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def answers(model_dir: Path, adapter: Path | None, prompts: list[str], max_new_tokens: int) -> list[dict[str, Any]]:
    """One {"prompt", "base", "tuned"} for each prompt; tuned is None without an adapter."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(device).eval()
    base = [_answer(model, tokenizer, prompt, max_new_tokens) for prompt in prompts]
    tuned: list[str | None] = [None] * len(prompts)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
        tuned = [_answer(model, tokenizer, prompt, max_new_tokens) for prompt in prompts]
    return [{"prompt": p, "base": b, "tuned": t} for p, b, t in zip(prompts, base, tuned, strict=True)]


def _answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    turns = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(
        model.device
    )
    with torch.inference_mode():
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, help="an adapter's folder, in PEFT's format")
    parser.add_argument("--prompt", action="append", required=True, help="what to ask; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    args = parser.parse_args()
    found = answers(args.model, args.adapter, args.prompt, args.max_new_tokens)
    if args.json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for answer in found:
        print(f"\n> {answer['prompt']}\n  base   {answer['base'] or '(an empty answer)'}")
        if answer["tuned"] is not None:
            print(f"  tuned  {answer['tuned'] or '(an empty answer)'}")


if __name__ == "__main__":
    main()
