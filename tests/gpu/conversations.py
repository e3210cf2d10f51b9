"""Conversations of many lengths from the project's own texts: `conversations.py TEXT.json TO.jsonl TOKENS LONGEST`.

Most of each is the answer, which is trained on. Lengths are spread as in real data: many short, few near LONGEST.
"""

import json
import random
import sys
from pathlib import Path

CHARS_A_TOKEN = 3.0


def main():
    source, target, tokens, longest = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    texts = [text for _, text in json.loads(Path(source).read_text(encoding="utf-8"))["texts"]]
    dice, made, lines = random.Random(0), 0, []
    while made < tokens:
        wanted = int(longest * (0.08 + 0.85 * dice.random() ** 2))
        answer = ""
        while len(answer) < wanted * CHARS_A_TOKEN:
            answer += dice.choice(texts).strip() + "\n\n"
        answer = answer[: int(wanted * CHARS_A_TOKEN)]
        question = f"Number {len(lines)}: what does the documentation say?"
        lines.append(
            json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        )
        made += wanted
    Path(target).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} records, about {made} tokens")


if __name__ == "__main__":
    main()
