"""Ask and measure base and tuned model, on one card of the head or over all ranks; show what they say. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from inventory.node_program import Program, ProgramError
from inventory.shown import shown
from inventory.terminal import console, table
from training.data.file_names import NAMES, names_text
from training.data.hub import HubDataSet
from training.data.questions import Question, Sampling, from_prompts
from training.data.readers import check
from training.data.sample import CURE, DataError
from training.data.source import data_of, data_sha256, given, placed
from training.laptop import follow, new_run, runs, start_lock
from training.laptop.adapter import tuned_model
from training.laptop.adapter.tuned_model import TunedModel
from training.laptop.head_node import Head
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.laptop.runs import GENERATE
from training.run.evaluations import SENT, SPLIT, file_of, measured_on, scored, trained_on
from training.run.folder import PLAN, RESULT
from training.run.launch import Launch, LaunchError
from training.text.catalogue import EMPTY_ANSWER, ENGLISH
from training.text.counts import many, size_text
from training.text.files import bounded_json
from training.text.problems import AdapterError

HELP = "/reset begins anew, /exit ends"


def on_head(head: Head, about: TunedModel, questions: Sequence[Question], sampling: Sampling) -> list[dict[str, Any]]:
    """The answers of one process on the head; a chat, where nothing is asked."""
    if not questions:
        with tuned_model.start(head, about, "generate", ["--serve", *sampling.argv(), *about.template_argv]) as program:
            chat(program, about.asks)
        return []
    files = {"questions.jsonl": json_lines(questions)}
    argv = ["--attached", "--prompts", "questions.jsonl", *sampling.argv(), *about.template_argv]
    with tuned_model.start(head, about, "generate", argv, files) as program:
        return [message["answer"] for message in program.messages()]


def json_lines(rows: Sequence[Any]) -> str:
    """A line of JSON each."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def chat(talk: Program, key: str, read: Callable[[str], str] = input) -> None:
    """Until /exit, the end of input or Ctrl-C. Each model has its own history: its own answers. `key`: what a prompt
    alone is asked as."""
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
            first = dict.fromkeys(names, from_prompts([line], key)[0])
            is_first = len(histories[names[0]]) == 1
            talk.send(first if is_first else {who: {"messages": history} for who, history in histories.items()})
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
    grid = Table(expand=True, show_lines=False)
    for name in texts:
        grid.add_column(name, overflow="fold", ratio=1)
    grid.add_row(*(Text(shown(text) or EMPTY_ANSWER) for text in texts.values()))
    return grid


def print_answers(answers: Sequence[Mapping[str, Any]]) -> None:
    """Questions with their answers."""
    terminal = console()
    for answer in answers:
        terminal.print(Text(f"\n> {shown(answer['prompt'])}"))
        terminal.print(side_by_side({who: answer[who] for who in ("base", "tuned") if answer[who] is not None}))


# Start the answers of a model over all ranks of a cluster, as trainings are started.

STOP_GRACE_S = 1
"""There is nothing to save."""


def on_all_ranks(
    cluster: Session, about: TunedModel, questions: Sequence[Question], sampling: Sampling, now: datetime
) -> list[dict[str, Any]]:
    """The answers of ranks that each hold a share of the layers; none after Ctrl-C, which ends the ranks too."""
    head = cluster.head
    with start_lock.locked_start(cluster) as lock, new_run.new_run_folder(head, GENERATE, now) as run_id:
        lock.start_supervisor(_prepare_generation(cluster, run_id, about, questions, sampling))
    seen = follow.follow_run(head, run_id)
    if seen is None:
        follow.ask_to_stop(head, run_id)
        return []
    follow.print_outcome(head, run_id, seen)
    if seen.state != "finished":
        raise LaunchError(f"{run_id} was stopped before it had answered")
    result = bounded_json(runs.file_of(head, run_id, RESULT))
    sizes = ", ".join(size_text(nbytes) for nbytes in result["loaded_bytes"])
    print(f"each rank held its share of the layers: {sizes}")
    if result["note"]:
        print(shown(str(result["note"])), file=sys.stderr)
    answers: list[dict[str, Any]] = result["answers"]
    return answers


def _prepare_generation(
    cluster: Session, run_id: str, about: TunedModel, questions: Sequence[Question], sampling: Sampling
) -> Launch:
    """Its folder gets the adapter and the questions, and goes to all nodes."""
    head, run_dir = cluster.head, cluster.head.runs / run_id
    launch = replace(cluster.launch_of(run_id, "training.node.adapter.pipeline"), stop_grace_s=STOP_GRACE_S)
    if launch.world_size < 2:
        raise AdapterError("one rank is no more than one card: answers over several need more nodes or cards")
    head.ask(fs.link_tree, about.learned, run_dir / "adapter")
    plan = {"run_id": run_id, "cluster": cluster.name, "of": about.run_id, "step": about.step}
    request = {"model": about.model, "questions": list(questions), "sampling": asdict(sampling)}
    request["template_args"] = about.template_args
    files = {PLAN: json.dumps(plan, indent=1) + "\n", "questions.json": json.dumps(request) + "\n"}
    new_run.upload_new_run(head, launch, files)
    return launch


# An evaluation in a table.


@dataclass(frozen=True)
class Measurable:
    """What to measure on."""

    place: str
    """Where it lies beside the program, or a prepared folder."""
    called: str = ""
    """By its owner; empty for the run's validation split."""
    kept_as: str = SPLIT
    """In the run's folder: the measure of other data does not take the place of the split's."""
    files: Mapping[str, Path | str] = field(default_factory=dict)
    """To send, by their place there."""
    skip_bad: bool = False
    """Whether records that cannot be used are left out."""
    bad: int = 0
    """How many of them this machine found."""

    @property
    def argv(self) -> list[str]:
        """The same as flags of the program."""
        return [
            "--data",
            self.place,
            *(["--of", self.called] if self.called else []),
            *(["--skip-bad"] if self.skip_bad else []),
        ]


def data_to_measure_on(data: Sequence[str], skip_bad: bool = False) -> Measurable:
    """Files and folders of records. Every record is read: raises DataError before anything is sent."""
    source = given(data)
    if source is None or isinstance(source, HubDataSet):
        raise DataError(f"--data {source}: files or folders are measured on; fab fetches no data set for that")
    paths = source if isinstance(source, tuple) else (source,)
    summary = check(data_of(source), skip_bad, CURE)
    digest = data_sha256(source)[:12]
    place = f"{SENT}{digest}"  # what an earlier evaluation sent lies there still
    place += paths[0].suffix if len(paths) == 1 else ""
    names = ", ".join(path.name or path.resolve().name for path in paths)
    files = placed(source, place)
    files[f"{place}.{NAMES}"] = names_text(files, source)
    return Measurable(place, names, file_of(digest), files, skip_bad, summary.bad)


def of_pairs(base: Mapping[str, Any]) -> str:
    """Where preferences were measured, of what: the end of a sentence."""
    return f", {many(base['pairs'], 'pair')}" if base.get("pairs") else ""


def print_evaluation(evaluation: Mapping[str, Any]) -> None:
    """The numbers, and what they were measured on."""
    base, of = evaluation["base"], measured_on(evaluation)
    print(
        f"{of or 'validation split'}: {many(base['samples'], 'sample')}{of_pairs(base)}, {base['tokens']} learned "
        f"tokens, {many(base['answers'], 'answer')} compared"
    )
    if cut := evaluation.get("cut"):
        print(
            f"{many(cut, 'text')} longer than max_length {evaluation['max_length']}: measured and compared up to there"
        )
    text, numbers = trained_on(evaluation)
    if text:
        print(ENGLISH(text, **numbers))
    rows = [list(row) for row in scored(evaluation, f"loss on {of}" if of else "held-out loss")]
    console().print(table(["", "base", "tuned"], rows))
