"""Talk with base and tuned model in a terminal, side by side. The control side; rich is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inventory.shown import console, shown
from training.control.talk import Talk, TalkBroken

HELP = "/reset begins anew, /exit ends"


def chat(talk: Talk, read: Callable[[str], str] = input) -> None:
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
        raise TalkBroken("the program on the head ended")
    return message


def side_by_side(texts: Mapping[str, str]) -> Any:
    """One column a model."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(*texts, expand=True, show_lines=False)
    grid.add_row(*(Text(shown(text) or "(an empty answer)") for text in texts.values()))
    return grid


def show(answers: Sequence[Mapping[str, Any]]) -> None:
    """Questions with their answers."""
    from rich.text import Text

    terminal = console()
    for answer in answers:
        terminal.print(Text(f"\n> {shown(answer['prompt'])}"))
        terminal.print(side_by_side({who: answer[who] for who in ("base", "tuned") if answer[who] is not None}))
