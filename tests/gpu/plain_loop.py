"""A plain transformers + PEFT loop over the rows of a finished run, to compare with.

    python plain_loop.py --run RUN_FOLDER --model DIR --out FILE.json [--seconds 60] [--checkpointing]

padded: the same records, sorted into micro-batches of about as many tokens, padded to the longest; its own loss.
packed: the same rows, position ids that start again with each sample, through transformers' packed masks and SDPA.
"""

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from training.data.order import Order
from training.data.prepared import open_prepared
from training.recipe.reading import read_recipe

STEPS = 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    recipe = read_recipe(args.run / "recipe.toml")
    data = open_prepared(args.run / "data" / "prepared" / "train")
    cuda = torch.cuda.is_available()
    on = "cuda" if cuda else "cpu"
    base = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map={"": on}
    )
    base.config.use_cache = False
    if args.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(
        base,
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0, **({"fused": True} if cuda else {}))
    order, results = Order(data.rows, recipe.seed, recipe.global_batch), []

    def packed(rows):
        for row in rows:
            ids = [token for sample in row for token in sample.ids]
            labels = [label for sample in row for label in (-100, *list(sample.labels)[1:])]
            places = [place for sample in row for place in range(len(sample.ids))]
            yield {
                "input_ids": torch.tensor([ids]),
                "labels": torch.tensor([labels]),
                "position_ids": torch.tensor([places]),
            }

    def padded(rows):
        samples = sorted((sample for row in rows for sample in row), key=lambda sample: len(sample.ids))
        part = []
        for number, sample in enumerate(samples):
            part.append(sample)
            more = samples[number + 1] if number + 1 < len(samples) else None
            if more is None or len(more.ids) * (len(part) + 1) > recipe.max_length:
                longest = max(len(one.ids) for one in part)
                room = [longest - len(one.ids) for one in part]
                yield {
                    "input_ids": torch.tensor([[*one.ids, *[0] * k] for one, k in zip(part, room, strict=True)]),
                    "labels": torch.tensor([[*one.labels, *[-100] * k] for one, k in zip(part, room, strict=True)]),
                    "attention_mask": torch.tensor(
                        [[1] * len(one.ids) + [0] * k for one, k in zip(part, room, strict=True)]
                    ),
                }
                part = []

    for name, batched in (("padded", padded), ("packed", packed)):
        if time.monotonic() > until:
            print("no time for the next")
            break
        try:
            took, tokens, losses = [], [], []
            for step in range(STEPS + 1):
                rows = [data.row(n) for n in order.step(step)]
                if step == 1 and cuda:
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                batches = list(batched(rows))
                learned = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
                losses.append(0.0)
                for batch in batches:
                    moved = {key: value.to(on) for key, value in batch.items()}
                    out = model(**moved, num_items_in_batch=learned)
                    out.loss.backward()
                    losses[-1] += out.loss.item()
                    del out
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if cuda:
                    torch.cuda.synchronize()
                took.append(time.perf_counter() - began)
                tokens.append(sum(len(sample.ids) for row in rows for sample in row))
            step_s = statistics.median(took[1:])
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            results.append(
                {
                    "name": name,
                    "step_s": step_s,
                    "tokens_per_s": statistics.median(tokens[1:]) / step_s,
                    "peak_gib": peak,
                    "checkpointing": args.checkpointing,
                    "micro_batches": len(batches),
                    "loss_first": losses[0],
                    "losses": losses,
                }
            )
            args.out.write_text(json.dumps(results, indent=1))
            print(
                f"{name}: {step_s:.3f} s, {results[-1]['tokens_per_s']:.0f} tokens/s, {peak:.1f} GiB, losses {losses}",
                flush=True,
            )
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
            optimizer.zero_grad()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    summary = "; ".join(f"{r['name']} {r['tokens_per_s']:.0f} tokens/s {r['peak_gib']:.1f} GiB" for r in results)
    print(f"RESULT {summary or 'nothing was measured'}", flush=True)
    os._exit(0 if results else 1)


if __name__ == "__main__":
    main()
