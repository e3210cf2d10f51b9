"""fab data / check / plan / train / logs / status / stop / fetch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from invoke import Collection, Context, Exit, task

from inventory.command_line import ask, sentences
from training.exit_codes import STOPPED

if TYPE_CHECKING:
    from training.laptop.follow import RunLook

DATA_HELP = (
    "JSONL, JSON, CSV, TSV or Parquet, a folder of them, or OWNER/NAME of a data set on the Hub; may be repeated"
)
HERE_HELP = "on this machine, a rank a GPU or two on its CPU; nothing is provisioned"
HERE_RUNS_HELP = "the runs of this machine, made with --here"
RUN_HELP = "run id; without it the newest run"


def end_as(seen: RunLook) -> None:
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
        "model": "recipe name, OWNER/NAME or folder; fab models lists them",
        "data": DATA_HELP,
        "steps": "optimizer steps instead of the recipe's",
        "epochs": "times through the data instead of the recipe's",
        "set": "key=value for any recipe key; may be repeated",
        "from_adapter": "begin with what this run has learned: its adapter, under its own recipe or --model's",
        "resume": "go on with the newest run of the model, or with the run id given",
        "force": "resume though recipe, base model or data are not what they were",
        "here": HERE_HELP,
        "detach": "start it and come back at once",
        "yes": "keep rented machines for longer than `hours`, where the run needs that, without asking",
        "no_fetch": "leave the results on the head",
        "dry": "only check and plan: will it run, will it teach?",
        "anyway": "start although an estimate (memory, number of records) says no",
        "skip_bad": "leave out records that cannot be used, and count them",
        "debug_rank": "this rank waits for a debugger, to which a tunnel leads; the others wait for it",
        "profile": "steps to profile on all ranks: 3 (after two of warm-up) or 10-12",
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
    anyway: bool = False,
    skip_bad: bool = False,
    debug_rank: str = "",  # as text, so that rank 0 is not taken for nothing
    profile: str = "",
) -> None:
    """Fine-tune a model: check, ship, start, follow, fetch."""
    from contextlib import ExitStack
    from dataclasses import replace
    from datetime import UTC, datetime
    from functools import partial

    with sentences("interrupted; fab runs lists what was started"), ExitStack() as stack:
        from training.laptop import (
            after_loss,
            attach,
            base_model,
            debugger,
            earlier_adapter,
            rental,
            resume_run,
            start_run,
        )
        from training.laptop.open_cluster import TRAINS_HERE, opened
        from training.launch import LaunchError

        if force and resume is None:
            raise LaunchError("--force is for --resume: a new run has nothing to differ from")
        asked_of = {**debugger.options(debug_rank, profile, detach), "confirm": partial(_ask, yes)}
        if resume is None:
            if here:
                base_model.refuse_unable_here()
            there = stack.enter_context(opened(here)) if from_adapter else None
            earlier = earlier_adapter.find(there.head, from_adapter) if there else None
            load = earlier.recipe if earlier and not model else None
            recipe = start_run.chosen_recipe(model or from_adapter, set or (), steps, epochs, load)
            given = stack.enter_context(start_run.checked_data(recipe, data or (), skip_bad))
            cluster = replace(there or stack.enter_context(opened(here, TRAINS_HERE)), **asked_of)
            rental.say_elsewhere(cluster)
            now = datetime.now(UTC)
            named = start_run.overrides_of(set or (), steps, epochs)
            run_id = start_run.start(
                cluster, recipe, given, now, earlier=earlier, dry=dry, anyway=anyway, named=named.keys()
            )
        elif data or dry or anyway or skip_bad or from_adapter:
            raise LaunchError(
                "a resumed run keeps its data and what it began with; leave --data, --from-adapter, --dry, --anyway "
                "and --skip-bad out, or start a new run without --resume (--from-adapter RUN_ID)"
            )
        else:
            overrides = start_run.overrides_of(set or (), steps, epochs)
            asked = resume if isinstance(resume, str) else None
            cluster = replace(stack.enter_context(opened(here)), **asked_of)
            rental.say_elsewhere(cluster)
            run_id = resume_run.resume(cluster, asked, model or None, overrides, force=force)
        if not run_id:
            return  # nothing was started: nothing is extended either
        if detach:
            attach.say_detached(run_id, here)
            rental.say_until(cluster)
            return
        with attach.said_to_go_on(lambda: run_id, here):
            stack.enter_context(rental.kept(cluster))
            if debug_rank:
                stack.enter_context(debugger.reached(cluster, run_id))
        if seen := after_loss.followed(cluster, run_id):
            after_loss.conclude(cluster, run_id, seen)
            if not no_fetch and attach.bring_home(cluster.head, run_id) is not None:
                attach.say_what_to_ask(cluster.head, run_id)
            end_as(seen)


@task(
    auto_shortflags=False,
    help={
        "data": f"{DATA_HELP}, and said without the flag: fab data FILE",
        "model": "recipe name, or a folder with a model; without it only shapes, counts and bad records are shown",
        "show": "records whose samples are shown, with what is learned of them",
        "set": "key=value for any recipe key; may be repeated",
        "skip_bad": "look at the rest as if records that cannot be used were left out",
        "here": "on this machine alone: the model's tokenizer must be here",
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
    """Look into data: what is wrong with them, and what is learned of them."""
    with sentences():
        from datetime import UTC, datetime

        from inventory.shown import shown
        from training.laptop import data_look, look_table, start_run

        recipe = start_run.recipe_for_data(model, set or ()) if model else None
        asked = data_look.Question(tuple(data or ()), model, recipe, show, skip_bad, here, tuple(set or ()))
        with look_table.progress() as tell:
            found = data_look.look(asked, datetime.now(UTC), tell)
        look_table.show(found)
        if aside := data_look.aside(asked):
            print(shown(aside))
        print(data_look.next_step(asked, found))
        if not found.usable:
            raise Exit(code=2)


@task(
    auto_shortflags=False,
    help={
        "model": "recipe name, OWNER/NAME or folder; fab models lists them",
        "data": "JSONL, JSON, CSV, TSV or Parquet, or a folder: adds time and money of the whole run; may be repeated",
        "nodes": "how many machines; 0: those that stand, else as cluster.toml says",
        "hours": "how long they are there: adds what of the run is done by then",
        "card": "as if the machines had this kind of card, such as A10; or A10,L20: a node each; no cloud is asked",
        "line_rate_gbps": "what the network promises, in Gbit/s, instead of the settings' own",
        "price_per_hour": "what one node costs, instead of what cluster.toml or the cloud says",
        "set": "key=value for any recipe key; may be repeated",
        "skip_bad": "plan the rest as if records that cannot be used were left out",
        "rent": "before any machine is there: which to rent, and how many, by money and time",
        "take": "with --rent: cheapest, fastest or a row's number; writes its types and nodes into cluster.toml",
        "json": "print it for other programs",
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
    """Show every strategy for a model: speed, memory, money; --rent: machines."""
    with sentences():
        from inventory.settings import load_settings
        from training.laptop import plan_options, plan_view, start_run
        from training.launch import LaunchError

        if take and not rent:
            raise LaunchError(f"--take {take} is for --rent")
        recipe = start_run.chosen_recipe(model, set or ())
        amounts = {"--hours": hours, "--line-rate-gbps": line_rate_gbps, "--price-per-hour": price_per_hour}
        there_h, rate, price = (plan_options.amount(flag, text) for flag, text in amounts.items())
        files, settings = tuple(data or ()), tuple(set or ())
        wish = plan_options.PlanWish(files, nodes, there_h, card, rate, price, settings, skip_bad)
        if rent:
            from training.laptop import rent_view

            choices = rent_view.rent_choices(load_settings(), recipe, wish)
            (rent_view.print_choices_json if json else rent_view.print_choices)(choices)
            if take:
                rent_view.take(choices, take, sys.stderr if json else None)
            return
        asked = plan_options.plan_question(load_settings(), recipe, wish)
        if not (plan_view.print_plan_json if json else plan_view.print_plan)(asked):
            raise Exit(code=2)


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "follow": "go on until the run is over",
        "rank": "a rank's own log",
        "facts": "what NCCL said of versions, interfaces, transports and trouble (with NCCL_DEBUG=INFO)",
        "here": HERE_RUNS_HELP,
    },
)
def logs(
    c: Context, run: str = "", follow: bool = False, rank: int = -1, facts: bool = False, here: bool = False
) -> None:
    """Show a run's log or one rank's; --follow shows its progress."""
    from training.laptop import after_loss, attach, rental, runs
    from training.laptop.open_cluster import opened

    with sentences(), opened(here) as cluster:
        run_id = runs.find(cluster.head, run or None)
        if rank >= 0 or facts or not follow:
            attach.show_log(cluster, run_id, rank, facts)
            return
        with rental.kept(cluster):
            seen = after_loss.followed(cluster, run_id)
        if seen:
            after_loss.conclude(cluster, run_id, seen)
            attach.say_where_it_is(cluster.head, run_id)
            end_as(seen)


@task(auto_shortflags=False, help={"here": HERE_RUNS_HELP})
def status(c: Context, here: bool = False) -> None:
    """All runs; whether every node answers; until when rented machines are there."""
    with sentences():
        from training.laptop import status as status_of
        from training.laptop.open_cluster import here_named, opened

        if not here:
            with here_named():
                status_of.show_rented()
        with opened(here) as cluster:
            status_of.show(cluster)


@task(auto_shortflags=False, help={"run": RUN_HELP, "here": HERE_RUNS_HELP})
def stop(c: Context, run: str = "", here: bool = False) -> None:
    """End a run: it saves, leaves, and no rank is left anywhere."""
    from training.laptop import rental, stop_run
    from training.laptop.open_cluster import opened

    with sentences(), opened(here) as cluster:
        stop_run.stop(cluster, run or None)
        rental.leave_idle(cluster)


@task(
    auto_shortflags=False,
    help={
        "run": RUN_HELP,
        "watch": "fetch every new checkpoint until the run is over",
        "full": "the optimizer's state too: as large as several adapters, and only a resume needs it",
        "here": HERE_RUNS_HELP,
    },
)
def fetch(c: Context, run: str = "", watch: bool = False, full: bool = False, here: bool = False) -> None:
    """Bring a run's newest adapter, metrics and logs home, verified."""
    from training.laptop import attach, rental, runs
    from training.laptop.open_cluster import opened

    with sentences(), opened(here) as cluster:
        run_id = runs.find(cluster.head, run or None)
        step = attach.bring_home(cluster.head, run_id, full)
        if watch:
            attach.fetch_until_over(cluster.head, run_id, step, full)
        rental.leave_idle(cluster)


@task(
    auto_shortflags=False,
    help={
        "line_rate_gbps": "what the network promises, in Gbit/s, instead of the settings' own",
        "here": HERE_HELP,
        "json": "print result.json",
    },
)
def check(c: Context, line_rate_gbps: float = 0.0, here: bool = False, json: bool = False) -> None:
    """Check that the nodes talk correctly, and how fast."""
    if not 0 <= line_rate_gbps < inf:
        raise Exit(f"--line-rate-gbps {line_rate_gbps:g}: a rate is above 0, and finite", code=2)
    from datetime import UTC, datetime

    from training.laptop import comm_check
    from training.laptop.open_cluster import opened

    with sentences(), opened(here) as cluster:
        comm_check.check(cluster, datetime.now(UTC), line_rate_gbps, json)


namespace = Collection(data, check, plan, train, logs, status, stop, fetch)
