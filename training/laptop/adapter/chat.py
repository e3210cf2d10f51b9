"""Talk with base and tuned model in a terminal, side by side. The control side; rich is imported where it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inventory.node_program import Program, ProgramError
from inventory.shown import console, shown
from training.laptop.adapter import tuned_model
from training.laptop.adapter.tuned_model import TunedModel
from training.laptop.head_node import Head
from training.questions import Messages, Sampling
from training.words import EMPTY_ANSWER

HELP = "/reset begins anew, /exit ends"


def on_head(head: Head, about: TunedModel, questions: Sequence[Messages], sampling: Sampling) -> list[dict[str, Any]]:
    """The answers of one process on the head; a chat, where nothing is asked."""
    if not questions:
        with tuned_model.start(head, about, "generate", ["--serve", *sampling.argv(), *about.template_argv]) as program:
            chat(program)
        return []
    files = {"questions.jsonl": json_lines([{"messages": messages} for messages in questions])}
    argv = ["--attached", "--prompts", "questions.jsonl", *sampling.argv(), *about.template_argv]
    with tuned_model.start(head, about, "generate", argv, files) as program:
        return [message["answer"] for message in program.messages()]


def json_lines(rows: Sequence[Any]) -> str:
    """A line of JSON each."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def chat(talk: Program, read: Callable[[str], str] = input) -> None:
    """Until /exit, the end of input or Ctrl-C. Each model has its own history: its own answers."""
    from rich.live import Live

    terminal = console()
    messages = talk.messages()
    try:
        names: list[str] = _next(messages)["ready"]
        terminal.print(f"{' and '.join(names)} listen; {HELP}")
        histories: dict[str, list[dict[str, str]]] = {who: [] for who in names}
        for line in _lines(read):
            if line == "/reset":
                histories = {who: [] for who in names}
                terminal.print("forgotten")
                continue
            for history in histories.values():
                history.append({"role": "user", "content": line})
            talk.send(histories)
            texts = dict.fromkeys(names, "")
            with Live(side_by_side(texts), console=terminal, refresh_per_second=8) as live:
                for message in _answers(messages, names[-1]):
                    texts[message["who"]] = message["text"]
                    live.update(side_by_side(texts))
            for who, history in histories.items():
                history.append({"role": "assistant", "content": texts[who]})
    except KeyboardInterrupt:
        terminal.print()


def _lines(read: Callable[[str], str]) -> Iterator[str]:
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            console().print()  # the shell's prompt begins a line of its own
            return
        if line == "/exit":
            return
        if line:
            yield line


def _answers(messages: Iterator[dict[str, Any]], last: str) -> Iterator[dict[str, Any]]:
    while True:
        message = _next(messages)
        yield message
        if message["done"] and message["who"] == last:
            return


def _next(messages: Iterator[dict[str, Any]]) -> dict[str, Any]:
    message = next(messages, None)
    if message is None:
        raise ProgramError("the program on the head ended")
    return message


def side_by_side(texts: Mapping[str, str]) -> Any:
    """One column a model. Languages without blanks wrap too."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(expand=True, show_lines=False)
    for name in texts:
        grid.add_column(name, overflow="fold", ratio=1)
    grid.add_row(*(Text(shown(text) or EMPTY_ANSWER) for text in texts.values()))
    return grid


def show(answers: Sequence[Mapping[str, Any]]) -> None:
    """Questions with their answers."""
    from rich.text import Text

    terminal = console()
    for answer in answers:
        terminal.print(Text(f"\n> {shown(answer['prompt'])}"))
        terminal.print(side_by_side({who: answer[who] for who in ("base", "tuned") if answer[who] is not None}))
