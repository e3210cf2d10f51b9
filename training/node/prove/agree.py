"""Do an adapter beside its base model and the two merged say the same? Runs on the head.

    python -m training.node.prove.agree --model DIR --adapter DIR --to DIR

merges into `--to`, which must not be there, removes it in the end, and prints one outcome as JSON.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from training.data.questions import Sampling, from_prompts
from training.node.adapter.generate import BASE, TUNED, Pair, speaking
from training.node.adapter.merge import merge
from training.run.outcome import as_rows, judged

QUESTION = from_prompts(["What does textwrap.dedent do?"])[0]
TOLERANCE = 0.05
"""Of the logits' length: merged weights are rounded to the base's 16 bits once more."""


def logits(pair: Pair, who: str) -> torch.Tensor:
    """(tokens, vocabulary), fp32, of the question."""
    ids = torch.tensor([pair.voice.prompt(QUESTION)], device=pair.models[who].device)
    with torch.inference_mode(), speaking(pair.models[who], who):
        return pair.models[who](input_ids=ids).logits[0].float().cpu()


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--adapter", "--to"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    try:
        merge(arguments.model, arguments.adapter, arguments.to)
        beside, merged = Pair(arguments.model, arguments.adapter), Pair(arguments.to, None)
        base, tuned, one = logits(beside, BASE), logits(beside, TUNED), logits(merged, BASE)
        few = Sampling(max_new_tokens=16)
        answers = [pair.answer(who, QUESTION, few) for pair, who in ((beside, TUNED), (merged, BASE))]
    finally:
        shutil.rmtree(arguments.to, ignore_errors=True)
    off, learned = float((one - tuned).norm() / tuned.norm()), float((base - tuned).norm() / tuned.norm())
    same = "the same answer" if answers[0] == answers[1] else "answers that part where two tokens are as likely"
    words = f"merged is off by {off:.1e} of the logits, the base by {learned:.1e}; {same}"
    print(json.dumps(as_rows([judged("adapter, merge, generate", off < min(TOLERANCE, learned), words)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
