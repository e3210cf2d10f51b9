"""fab data / check / plan / train / logs / status / stop / fetch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, sentences
from inventory.shown import print_json, shown
from training.text.deferred import deferred
from training.text.problems import STOPPED

with deferred():
    from inventory import settings as cluster_toml
    from training.laptop import (
        base_model,
        data_view,
        machines,
        open_cluster,
        plan_options,
        plan_view,
        preparing,
        rent_options,
        rent_view,
        rental,
        resume_run,
        run_news,
        runs,
        start_run,
        tunnels,
    )
    from training.laptop import fetch as fetching
    from training.laptop import follow as following
    from training.laptop import status as status_of
    from training.run import launch, launchers

if TYPE_CHECKING:
    from training.laptop.open_cluster import Session
    from training.laptop.run_look import RunLook

DATA_HELP = "JSONL, JSON, CSV, TSV or Parquet file, a folder of them, or OWNER/NAME of a dataset on the Hub; repeatable"
HERE_HELP = "run on this machine: one rank per GPU, or two on the CPU"
HERE_RUNS_HELP = "use the runs of this machine, made with --here"
RUN_HELP = "run id; default: the newest run"


def exit_as(seen: RunLook) -> None:
    """A run that was stopped before its end is not done: whoever waits for the command sees it by its exit code."""
    if seen.state == "stopped":
        raise Exit(code=STOPPED)


def _ask(yes: bool, question: str) -> None:
    """Go on where the answer is yes. Raises Exit."""
    ask(yes, question, f"{shlex.join(['fab', *sys.argv[1:]])} --yes")


@task(
    auto_shortflags=False,
    iterable=["data", "set"],
    optional=["resume"],
    help={
        "model": "recipe name, OWNER/NAME on the Hub, or folder; see fab models",
        "data": DATA_HELP,
        "steps": "number of optimizer steps; overrides the recipe",
        "epochs": "passes over the data; overrides the recipe",
        "set": "KEY=VALUE overrides a recipe key; repeatable",
        "from_adapter": "start from the adapter of this run, with its recipe or that of --model",
        "resume": "resume this run, or without an id the newest run of the model; while it goes on: take in new nodes",
        "force": "resume even if recipe, base model or data have changed",
        "here": HERE_HELP,
        "detach": "start the run and return at once",
        "yes": "extend the rental beyond `hours` without asking if the run needs it",
        "no_fetch": "do not download the results",
        "dry": "only check and plan",
        "print": "spotune, torchrun or deepspeed: prepare the run and print the line to type on each node",
        "anyway": "start even if an estimate (memory, number of records) advises against it",
        "skip_bad": "skip unusable records and count them",
        "debug_rank": "this rank waits for a debugger, which connects through a tunnel",
        "profile": "steps to profile on all ranks: 3 (after two warm-up steps) or 10-12",
    },
)
def train(
    c: Context,
    model: str = "",
    data: Sequence[str] | None = None,
    steps: str = "",  # as text, so that 0 is refused and not taken for nothing
    epochs: str = "",
    set: Sequence[str] | None = None,  # invoke wants None here to make a list of it
    from_adapter: str = "",
    resume: str | None = None,
    force: bool = False,
    here: bool = False,
    detach: bool = False,
    yes: bool = False,
    no_fetch: bool = False,
    dry: bool = False,
    print: str | None = None,
    anyway: bool = False,
    skip_bad: bool = False,
    debug_rank: str = "",  # as text, so that rank 0 is not taken for nothing
    profile: str = "",
) -> None:
    """Fine-tune a model: check, ship, start, follow, fetch."""
    with sentences(), ExitStack() as stack:
        if force and resume is None:
            raise launch.LaunchError("--force is for --resume: a new run has nothing to differ from")
        options = {**tunnels.options(debug_rank, profile, detach), "confirm": partial(_ask, yes)}
        opened = partial(_opened, stack, here, options, not (detach or dry or print))
        overrides = start_run.overrides_of(set or (), steps, epochs)
        if here:
            base_model.check_python_here()
        if (by_hand := launchers.parse_by_hand(print)) and (resume is not None or dry or detach or debug_rank):
            raise launch.LaunchError("--print starts nothing: leave --resume, --dry, --detach and --debug-rank out")
        wish = start_run.TrainWish(model, data or (), overrides, from_adapter, skip_bad, dry, anyway, by_hand)
        if resume is None:
            cluster, request = stack.enter_context(start_run.cluster_and_request(wish, opened))
            rental.print_other_billing(cluster)
            run_id = start_run.start(cluster, request, datetime.now(UTC))
        elif wish.fits_resume:
            named = resume if isinstance(resume, str) else None
            recipe = start_run.run_name(model) if model and not named else ""
            cluster = opened("")
            rental.print_other_billing(cluster)
            run_id = resume_run.resume(cluster, named, recipe, overrides, force=force)
        else:
            raise launch.LaunchError(
                "a resumed run keeps its data and what it began with; leave --data, --from-adapter, --dry, --anyway "
                "and --skip-bad out, or start a new run without --resume (--from-adapter RUN_ID)"
            )
        if not run_id:
            return  # nothing was started: nothing is extended either
        if detach:
            following.print_detached(run_id, here)
            rental.print_release_time(cluster)
            return
        with following.detached_on_interrupt(run_id, here):
            stack.enter_context(rental.lease_extended(cluster))
            if debug_rank:
                stack.enter_context(tunnels.reached(cluster, run_id))
        if seen := following.follow_training(cluster, run_id):
            following.print_outcome_and_losses(cluster, run_id, seen)
            if not no_fetch and fetching.collect_results(cluster.head, run_id) is not None:
                fetching.print_next_commands(cluster.head, run_id)
            exit_as(seen)


def _opened(stack: ExitStack, here: bool, options: Mapping[str, Any], is_followed: bool, instead: str) -> Session:
    """The cluster that a training uses, until the stack is left."""
    cluster = stack.enter_context(open_cluster.open_cluster(here, instead))
    send = stack.enter_context(run_news.opened_notifier(cluster.settings if is_followed else None))
    return replace(cluster, send=send, **options)


@task(
    auto_shortflags=False,
    help={
        "data": f"{DATA_HELP}, and can be given without the flag: fab data FILE",
        "model": "recipe name or model folder; without it only formats, counts and bad records are shown",
        "show": "number of samples to show, with the tokens that are trained on",
        "set": "KEY=VALUE overrides a recipe key; repeatable",
        "skip_bad": "ignore unusable records",
        "here": "use this machine only; the model's tokenizer must be on it",
    },
    iterable=["data", "set"],
)
def data(
    c: Context,
    data: Sequence[str] | None = None,
    model: str = "",
    show: int = 3,
    set: Sequence[str] | None = None,
    skip_bad: bool = False,
    here: bool = False,
) -> None:
    """Inspect training data: errors, lengths, and which tokens are trained on."""
    with sentences():
        recipe = start_run.recipe_for_data(model, set or ()) if model else None
        question = data_view.Question(tuple(data or ()), model, recipe, show, skip_bad, here, tuple(set or ()))
        with data_view.progress() as tell:
            look = data_view.look(question, datetime.now(UTC), tell)
        data_view.show(look)
        if aside := data_view.aside(question):
            print(shown(aside))
        print(data_view.next_step(question, look))
        if not look.usable:
            raise Exit(code=2)


@task(
    auto_shortflags=False,
    help={
        "model": "recipe name, OWNER/NAME on the Hub, or folder; see fab models",
        "data": "training data, to estimate time and cost of the whole run; repeatable",
        "nodes": "number of machines; 0: the current ones, else as in cluster.toml",
        "hours": "show how much of the run finishes within this many hours",
        "card": "assume this GPU, such as A10, or one per node: A10,L20; no cloud is asked",
        "line_rate_gbps": "nominal network speed in Gbit/s; overrides cluster.toml",
        "price_per_hour": "price of one node per hour; overrides cluster.toml and the cloud",
        "set": "KEY=VALUE overrides a recipe key; repeatable",
        "skip_bad": "ignore unusable records",
        "rent": "compare machines to rent, by cost and time",
        "take": "with --rent: cheapest, fastest or a row number; writes the choice to cluster.toml",
        "json": "print as JSON",
    },
    iterable=["data", "set"],
)
def plan(
    c: Context,
    model: str = "",
    data: Sequence[str] | None = None,
    nodes: int = 0,
    hours: str = "",
    card: str = "",
    line_rate_gbps: str = "",  # as text, so that 0 is refused and not taken for nothing
    price_per_hour: str = "",
    set: Sequence[str] | None = None,
    skip_bad: bool = False,
    rent: bool = False,
    take: str = "",
    json: bool = False,
) -> None:
    """Compare strategies for a model by speed, memory and cost; --rent: machines."""
    with sentences():
        if take and not rent:
            raise launch.LaunchError(f"--take {take} is for --rent")
        recipe = start_run.resolve_recipe(model, set or ())
        amounts = {"--hours": hours, "--line-rate-gbps": line_rate_gbps, "--price-per-hour": price_per_hour}
        there_h, rate, price = (plan_options.amount(flag, text) for flag, text in amounts.items())
        cards, settings = machines.named_cards(card), tuple(set or ())
        wish = plan_options.PlanWish(tuple(data or ()), nodes, there_h, cards, rate, price, settings, skip_bad)
        if rent:
            choices = rent_options.rent_choices(cluster_toml.load_settings(), recipe, wish)
            (rent_view.print_choices_json if json else rent_view.print_choices)(choices)
            if take:
                rent_options.take(choices, take)
            return
        question = plan_options.plan_question(cluster_toml.load_settings(), recipe, wish)
        if not (plan_view.print_plan_json if json else plan_view.print_plan)(question):
            raise Exit(code=2)


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "follow": "follow until the run ends",
        "rank": "show the log of this rank",
        "all": "show every line of all starts, the launcher's and NCCL's too",
        "facts": "show what NCCL logged: version, interfaces, transports, warnings (needs NCCL_DEBUG=INFO)",
        "here": HERE_RUNS_HELP,
    },
)
def logs(
    c: Context,
    run: str = "",
    follow: bool = False,
    rank: int = -1,
    facts: bool = False,
    all: bool = False,
    here: bool = False,
) -> None:
    """Show the log of a run or of one rank; --follow shows progress."""
    flags = {"--rank": rank >= 0, "--facts": facts, "--all": all, "--follow": follow}
    chosen = [flag for flag, is_set in flags.items() if is_set]
    if chosen[1:]:
        raise Exit(f"{' and '.join(chosen)}: one of them at a time", code=2)
    with sentences(), open_cluster.open_cluster(here) as cluster:
        run_id = runs.find(cluster.head, run or None)
        if not follow:
            status_of.show_log(cluster, run_id, status_of.LogPart("".join(chosen)), rank)
            return
        with run_news.opened_notifier(cluster.settings, needed=False) as send:
            followed = replace(cluster, send=send)
            with rental.lease_extended(followed):
                seen = following.follow_training(followed, run_id)
        if seen:
            following.print_outcome_and_losses(cluster, run_id, seen)
            fetching.print_results_place(cluster.head, run_id)
            exit_as(seen)


@task(auto_shortflags=False, help={"here": HERE_RUNS_HELP, "json": "print as JSON"})
def status(c: Context, here: bool = False, json: bool = False) -> None:
    """Show runs, nodes, rented machines and when they are released."""
    with sentences():
        with open_cluster.hint_here():
            rented = () if here else status_of.show_rented()
        with open_cluster.open_cluster(here) as cluster:
            if json:
                print_json(status_of.values(cluster, rented))
            else:
                status_of.show(cluster)


@task(
    auto_shortflags=False,
    help={"run": "run id; default: the run that is going on, else the newest", "here": HERE_RUNS_HELP},
)
def stop(c: Context, run: str = "", here: bool = False) -> None:
    """Stop a run: it saves a checkpoint, and all its processes end."""
    with sentences(), open_cluster.open_cluster(here) as cluster:
        following.stop(cluster, run or None)
        rental.shorten_idle_lease(cluster)


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "watch": "download every new checkpoint until the run ends",
        "full": "also download the optimizer state, which is several times larger and only needed to resume",
        "here": HERE_RUNS_HELP,
    },
)
def fetch(c: Context, run: str = "", watch: bool = False, full: bool = False, here: bool = False) -> None:
    """Download a run's adapter, metrics and logs, and verify them."""
    with sentences(), open_cluster.open_cluster(here) as cluster:
        run_id = runs.find(cluster.head, run or None)
        step = fetching.collect_results(cluster.head, run_id, full)
        if watch:
            fetching.fetch_until_over(cluster.head, run_id, step, full)
        rental.shorten_idle_lease(cluster)


@task(
    auto_shortflags=False,
    help={
        "line_rate_gbps": "nominal network speed in Gbit/s; overrides cluster.toml",
        "here": HERE_HELP,
        "json": "print as JSON",
    },
)
def check(c: Context, line_rate_gbps: float = 0.0, here: bool = False, json: bool = False) -> None:
    """Check that the nodes communicate correctly, and measure how fast."""
    if not 0 <= line_rate_gbps < inf:
        raise Exit(f"--line-rate-gbps {line_rate_gbps:g}: a rate is above 0, and finite", code=2)

    with sentences(), open_cluster.open_cluster(here) as cluster:
        preparing.check(cluster, datetime.now(UTC), line_rate_gbps, json)


namespace = Collection(data, check, plan, train, logs, status, stop, fetch)
