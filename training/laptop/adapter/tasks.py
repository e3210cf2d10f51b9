"""fab generate / evaluate / merge / publish."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from invoke import Collection, Context, task

from inventory.command_line import ask, say, sentences, yes_command
from training.laptop.tasks import HERE_RUNS_HELP, RUN_HELP
from training.text.counts import many, size_text
from training.text.deferred import deferred
from training.text.problems import AdapterError

with deferred():
    from training.data import questions as question_list
    from training.laptop import open_cluster, rental, start_lock
    from training.laptop.adapter import ask as asking
    from training.laptop.adapter import publish as publishing
    from training.laptop.adapter import tuned_model
    from training.run import folder as run_folder

CHECKPOINT_HELP = "step of the checkpoint, best or newest; default: best if known, else newest"


@task(
    auto_shortflags=False,
    iterable=["prompt"],
    help={
        "prompt": "prompt text; repeatable. Without --prompt and --prompts: chat in the terminal",
        "prompts": "file of records, as for training; their last answers are left out",
        "out": "JSONL file for the answers; default with --prompts: NAME.answers.jsonl beside it",
        "run": RUN_HELP,
        "checkpoint": CHECKPOINT_HELP,
        "across": "split the model over all ranks; automatic if it does not fit one card",
        "temperature": "sampling temperature; 0: greedy",
        "top_p": "nucleus sampling threshold; 0: the model's default",
        "max_new_tokens": "maximum length of an answer",
        "seed": "random seed for sampling",
        "here": HERE_RUNS_HELP,
    },
)
def generate(
    c: Context,
    prompt: Sequence[str],
    prompts: str = "",
    out: str = "",
    run: str = "",
    checkpoint: str = "",
    across: bool = False,
    temperature: float = 0.0,
    top_p: float = 0.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    here: bool = False,
) -> None:
    """Prompt the base and the tuned model side by side, or chat with both."""
    with sentences():
        if (" " in run or not run.isascii()) and not (prompt or prompts):
            raise AdapterError(f"no run is called {run!r}; to ask it: fab generate --prompt {shlex.quote(run)}")
        sampling = question_list.Sampling(max_new_tokens, temperature, top_p or None, seed)
        questions = question_list.from_prompts(prompt) + (
            question_list.read_questions(Path(prompts)) if prompts else []
        )
        target = Path(out) if out else Path(prompts).with_suffix(".answers.jsonl") if prompts else None
        if out and not questions:
            raise AdapterError(f"--out {out}: a chat is not written down; say --prompt or --prompts")
        if target and not target.parent.is_dir():
            raise AdapterError(f"--out {out}: there is no folder {target.parent}")
        if target and (target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK)):
            what = "is a folder" if target.is_dir() else "may not be written"
            raise AdapterError(f"--out {target}: it {what}; name a file, as in answers.jsonl")
        with open_cluster.open_cluster(here) as cluster, rental.in_use(cluster):
            about = tuned_model.tuned_model(cluster, run or None, checkpoint)
            questions[: len(prompt)] = question_list.from_prompts(prompt, about.asks)
            room = tuned_model.room_alone(cluster.head, about, at_once=True)
            if across or room.too_big:
                why = f"it and its base are asked on one card ({room.words()}), never over all ranks"
                tuned_model.refuse_whole(cluster.head, about, why)
            if room.too_big and not across:
                print(f"{about.model} does not fit one card ({room.words()}): it is spread over all ranks")
            if not (across or room.too_big):
                answers = asking.on_head(cluster.head, about, questions, sampling)
            elif questions:
                answers = asking.on_all_ranks(cluster, about, questions, sampling, datetime.now(UTC))
            else:
                raise AdapterError("a chat needs the model on one card; ask all ranks with --prompt or --prompts")
        if target and answers:
            target.write_text(asking.json_lines(answers), encoding="utf-8")
            print(
                f"{target}: {many(len(answers), 'answer')} of base and tuned model, step {about.step} of {about.run_id}"
            )
        else:
            asking.print_answers(answers)


@task(
    auto_shortflags=False,
    iterable=["data"],
    help={
        "data": "file or folder of records not used in training; repeatable; default: the run's validation split",
        "skip_bad": "skip unusable records and count them",
        "run": RUN_HELP,
        "checkpoint": CHECKPOINT_HELP,
        "answers": "number of greedy answers to compare with the records' answers; 0: none",
        "here": HERE_RUNS_HELP,
    },
)
def evaluate(
    c: Context,
    data: Sequence[str],
    run: str = "",
    checkpoint: str = "",
    skip_bad: bool = False,
    answers: int = 50,
    here: bool = False,
) -> None:
    """Measure the base and the tuned model on held-out records."""
    with sentences(), open_cluster.open_cluster(here) as cluster, rental.in_use(cluster):
        if skip_bad and not data:
            raise AdapterError("--skip-bad is for --data: the run's own validation split has no bad records")
        about = tuned_model.tuned_model(cluster, run or None, checkpoint)
        room = tuned_model.room_alone(cluster.head, about)
        if room.too_big:
            raise AdapterError(f"{about.model} does not fit one card ({room.words()}), and is measured on one")
        split = "" if data else tuned_model.validation_folder(cluster.head, about)
        on = asking.data_to_measure_on(data, skip_bad) if data else asking.Measurable(split)
        argv, out = on.argv, f"{about.launch.run_dir}/{on.kept_as}"
        argv += ["--max-length", str(tuned_model.max_length(cluster.head, about)), "--answers", str(answers)]
        argv += ["--out", out, "--attached"]
        argv += about.template_argv
        if on.bad:
            print(f"{many(on.bad, 'bad record')} left out")
        print(f"{about.run_id}, step {about.step}: measuring base and tuned model on {cluster.head.name}", flush=True)
        with tuned_model.start(cluster.head, about, "evaluate", argv, on.files) as talk:
            for message in talk.messages():
                asking.print_evaluation(message["evaluation"])
        home = "" if here else f"; bring it home with: fab fetch --run {about.run_id}"
        print(f"kept in {out}{home}")


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "checkpoint": CHECKPOINT_HELP,
        "to": "output folder on the head; default: merged/ in the run's folder",
        "fetch": "also download the merged model",
        "here": HERE_RUNS_HELP,
    },
)
def merge(
    c: Context, run: str = "", checkpoint: str = "", to: str = "", fetch: bool = False, here: bool = False
) -> None:
    """Merge the adapter into the base model, as a plain model folder."""
    with sentences(), open_cluster.open_cluster(here) as cluster, rental.in_use(cluster):
        about = tuned_model.tuned_model(cluster, run or None, checkpoint)
        tuned_model.refuse_whole(cluster.head, about, "there is no adapter to merge")
        if not checkpoint:
            now = f"--checkpoint {about.step} merges what it has learned by now"
            start_lock.refuse_unfinished(cluster.head, about.run_id, now)
        if fetch and not cluster.head.here:
            tuned_model.refuse_another_run(cluster.head, about.run_id)
        size = tuned_model.room(cluster.head, about.model).model_bytes
        target = str(Path(to).resolve()) if to and here else to or about.merged
        if not target.startswith("/"):
            raise AdapterError(f"--to {to}: a folder on {cluster.head.name} is named from its root, such as /data/{to}")
        if about.packing_bytes:
            print(
                "trained beside four bits a weight, merged into the base as it was: answers differ a little", flush=True
            )
        with tuned_model.start(cluster.head, about, "merge", ["--to", target, "--attached"]) as talk:
            for message in talk.messages():
                if "merging" in message:
                    what = f"merging step {about.step} of {about.run_id} into {message['merging']}"
                    print(f"{what}: {size_text(size)}", flush=True)
                    continue
                done = f"already merged, step {about.step}: " if message["already"] else ""
                files = many(message["files"], "file")
                print(f"{done}{message['folder']} on {cluster.head.name}: {files}, sealed by SHA256SUMS")
        if fetch and not cluster.head.here:
            home = tuned_model.home(about.run_id) / "merged"
            print(f"bringing {size_text(size)} home to {home}", flush=True)
            moved = tuned_model.fetch_folder(cluster.head, target, home)
            print(f"{home}: verified ({size_text(moved)} moved)")
            print(tuned_model.use_of_merged(about, f"./{home}", cluster.head))
        elif cluster.head.here:
            print(tuned_model.use_of_merged(about, target, cluster.head))
        else:
            hint = f"next: transformers and vLLM load it on {cluster.head.name}"
            again = f" --checkpoint {about.step}" if checkpoint else ""
            again += f" --to {shlex.quote(to)}" if to else ""
            print(f"{hint}; fab merge --run {about.run_id}{again} --fetch downloads it, to train from or publish")


@task(
    auto_shortflags=False,
    help={
        "repo": "repository on the Hub, or at HF_ENDPOINT, as OWNER/NAME",
        "run": "run id of a fetched run; default: the newest one on this machine",
        "merged": "publish the merged model instead of the adapter",
        "public": "make the repository public; default: private",
        "yes": "do not ask",
        "here": "accepted for consistency; publishing always reads this machine",
    },
)
def publish(
    c: Context,
    repo: str = "",
    run: str = "",
    merged: bool = False,
    public: bool = False,
    yes: bool = False,
    here: bool = False,
) -> None:
    """Upload a fetched adapter or merged model with its model card."""
    with sentences():
        if not repo:
            raise AdapterError(
                "where to? fab publish --repo OWNER/NAME says it: yours on the hub, made where it is not"
            )
        folder = publishing.local_run(run_folder.LOCAL_RUNS, run)
        what = publishing.parcel(folder, repo, merged, not public)
        hub = publishing.HuggingFace()
        again = yes_command("publish", publish, repo=repo, run=run, merged=merged, public=public)

        def show_and_ask(lines: list[str]) -> None:
            say("\n".join(lines))
            ask(yes, "publish this?", again)

        publishing.publish(hub, what, f"{folder.name}, by spotune", yes, show_and_ask)
        print(f"published and verified: {hub.address(repo)}")


namespace = Collection(generate, evaluate, merge, publish)
