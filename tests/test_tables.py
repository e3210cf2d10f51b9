"""Every table that is printed, at 80 columns: only words wrap, whatever is typed or compared stands in one piece."""

from __future__ import annotations

import ast
import io
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import deploy.tasks
from deploy.doctor import Finding, print_findings
from deploy.survey import GpuProcess, Held
from inventory import terminal
from inventory.cloud.values import Disk, Instance, InstanceType, Price, Snapshot, SpotAdvice
from inventory.nodes import Node
from inventory.phases import Phase
from inventory.renting import money_view, report
from inventory.renting.cost import SnapshotPrice
from inventory.renting.ledger import Entry
from inventory.renting.offers import Offer, Quote, Range
from inventory.renting.plan import RentalWish, UpPlan
from inventory.settings import Settings, load_settings
from inventory.terminal import Grid, console, table
from snapshots import show as snapshots
from snapshots.pruning import Decision
from snapshots.steps import Rebuild, Step
from tests.support.amount import Amount
from training.data.look.content import Look as DataLook
from training.data.statistics import lengths_of
from training.data.survey import FileSurvey, Survey
from training.laptop import (
    data_view,
    list_tasks,
    models_on_nodes,
    plan_options,
    plan_view,
    preparing,
    rent_options,
    rent_view,
    start_run,
    status,
)
from training.laptop.adapter import ask
from training.laptop.models_on_nodes import ModelRow
from training.laptop.plan_options import PlanWish
from training.laptop.prove import tasks as prove
from training.laptop.run_look import RunLook
from training.models.names import load_recipe
from training.plan.fits import Check
from training.run.folder import Status
from training.run.outcome import Outcome

ROOT = Path(__file__).parent.parent
FOLDERS = ("deploy", "inventory", "snapshots", "training")
AT_80 = 80
NOW = datetime(2026, 1, 31, 15, 45, tzinfo=UTC)
GIB_PRICE = SnapshotPrice(Amount(0.12), "CNY")
RUN = "qwen2.5-14b-20260131-154500"
TYPE, ZONE, ADDRESS = "ecs.gn7i-c16g1.4xlarge", "cn-hangzhou-j", "203.100.113.211"
LONG = "a step takes 2.41 s, 1.7 times the 1.42 s of its plan; later plans go by it"
INSTANCE_ID, DISK_ID = "i-bp67fbpjl9rbqprsnjhg", "d-bp1fcmq5q0hlkpq9v6ay"
SNAPSHOT_ID = "s-bp67fbpjl9rbqprsnjhg"
LISTED = """
provider = "static"
[ssh]
key = "{folder}/key"
[network]
line_rate_gbps = 16
[[nodes]]
name = "te1"
address = "203.0.113.11"
card = "A10"
price_per_hour = 1210.5
currency = "CNY"
[[nodes]]
name = "te2"
address = "203.0.113.12"
card = "A10"
price_per_hour = 1210.5
currency = "CNY"
"""

MACHINE = Instance(
    **{"instance_id": INSTANCE_ID, "name": "te1", "status": "Running", "instance_type": TYPE, "zone_id": ZONE},
    **{"created": NOW - timedelta(hours=3), "private_address": "10.213.177.101", "public_address": ADDRESS},
    **{"locks": ("recycling",), "release_at": NOW + timedelta(hours=26)},
    tags={"spotune:price-h": "12.3456", "spotune:currency": "CNY"},
)
SNAPSHOT = Snapshot(
    **{"snapshot_id": SNAPSHOT_ID, "name": "anna1-20260131-154500", "disk_id": DISK_ID, "disk_kind": "data"},
    **{"disk_gib": 120, "status": "progressing", "progress_percent": 40, "is_available": True, "created": NOW},
    size_bytes=67 * 2**30,
    tags={"spotune:run": RUN, "spotune:step": "400", "spotune:models-1": "qwen2.5-14b qwen3-30b-a3b"},
)
DISK = Disk(
    DISK_ID, "x", "data", 120, "cloud_essd", "In_use", ZONE, NOW, name="anna1-te1-data", source_snapshot_id=SNAPSHOT_ID
)
QUOTE = Quote(
    Offer(TYPE, ZONE, spot=Range(11.01, 12.02, 13.03, 12.0), advice=SpotAdvice(ZONE, TYPE, 20, 3, "0-3%"), reason=LONG),
    Price(Amount(12.3456), Amount(34.56), "CNY"),
    None,
    InstanceType(TYPE, 64, 256, 1, "NVIDIA A10"),
)
UP = UpPlan(
    RentalWish(4, 4.0), SimpleNamespace(instances=()), (1, 2, 3, 4), NOW, (QUOTE,) * 3, ssh_from=("203.0.113.7/32",)
)
CHECK = {
    **{"run_id": "check-20260131-154500", "cluster": "c", "time": 2.0, "backend": "nccl", "world_size": 12},
    **{"seconds": 12.0, "checks": [], "sweep": []},
    "nodes": [
        {"rank": n, "node": f"te{n}", "interface_expected": "eth0", "interfaces_used": ["enp135s0f0np0", "eth0"]}
        for n in range(12)
    ],
    "pairs": [{"from": f"te{a}", "to": f"te{b}", "gbit_s": 199.42, "latency_us": 9.0}
              for a in range(12) for b in range(12) if a != b],
}  # fmt: skip
CHECK["sweep"] = [
    {"operation": "reduce_scatter", "bytes": 2**27, "seconds": 1.0, "algbw_gbyte_s": 0.75, "busbw_gbyte_s": 1.0}
]


def a_run():
    its = Status(run_id=RUN, state="failed", reason=f"rank 3 on te2: {LONG}; see /data/runs/{RUN}/logs/rank-3.log")
    row = {"step": 1400, "total_steps": 12000, "loss": 1.23456}
    return RunLook(its, True, (row,), 7200.0, {"validation_loss": 1.3456}, RUN)


def a_listed_run(monkeypatch):
    copy = SimpleNamespace(
        **{"look": a_run(), "size_bytes": 130 * 2**20, "made_here": False, "steps": (200,), "claim": "", "wanted": 400},
        first_start=0.0,
    )
    monkeypatch.setattr(status, "listed", lambda home, here=False: ([status.RunRow(RUN, copy, copy)], ""))
    list_tasks.list_runs.body(None)


def all_plans(folder, show):
    (folder / "key").touch()
    (folder / "cluster.toml").write_text(LISTED.format(folder=folder))
    show(load_settings(folder / "cluster.toml"))


def an_evaluation():
    one = {"loss": 1.5, "samples": 1, "tokens": 3, "answers": 1}
    ask.print_evaluation({"base": one, "tuned": one})


def a_cluster():
    node = Node("te1", 0, ADDRESS, ADDRESS, "root", 22, Path(), Path(), 1)
    head = SimpleNamespace(name="te1", runs=Path("/data/runs"), here=False)
    status.show(
        SimpleNamespace(head=head, nodes=(node,), ask_all=lambda _: {"te1": f"no answer from {ADDRESS}: {LONG}"})
    )


def some_data():
    files = (FileSurvey("conversations/2026-01-31/part-00017.jsonl", 123456789, {"sharegpt": 12345, "text": 3}, 12),)
    data_view.show(DataLook(Survey(files, 12, ()), 12, (), False, lengths=lengths_of([10, 20, 64, 10000], 64)))


def a_proof():
    prove._show(SimpleNamespace(outcomes=[Outcome("memory of qwen2.5-14b", "pass", LONG, "te1")] * 2, calibration=None,
                                run_id="prove-20260131-154500"), 100.0)  # fmt: skip


def processes():
    its = GpuProcess(
        **{"pid": 4194303, "memory_mib": 22123, "user": "somebody", "age": "12-10:11:12", "start": "1", "run": RUN},
        command=f"/data/env/bin/python -u -m training.node.finetune /data/runs/{RUN}",
    )
    deploy.tasks._show({}, [Held("te1", its, True)])


def all_models():
    base = "mistralai/Mistral-Small-3.2-24B-Instruct-2506"
    row = ModelRow("qwen2.5-vl-72b", base, "apache-2.0", "mistral3",
                     int(24e9), int(24e9), 48e9, ("te1", "te2"), 4, "divided among them")  # fmt: skip
    models_on_nodes.show(models_on_nodes.lines(iter([row])), [])


CASES = {
    "deploy/doctor.py print_findings": lambda *_: print_findings(
        [Finding("Python environment", name, "broken", LONG, "fab up") for name in ("te1", "te2")], console()
    ),
    "deploy/tasks.py _show": lambda *_: processes(),
    "inventory/renting/report.py _up": lambda *_: report.display(report.up_table(UP)),
    "inventory/renting/money_view.py cost_table": lambda *_: report.display(money_view.cost_table([MACHINE], NOW)),
    "inventory/renting/report.py machines_table": lambda *_: report.display(
        report.machines_table([MACHINE], Settings(), NOW)
    ),
    "inventory/renting/money_view.py past_table": lambda *_: report.display(
        money_view.past_table(
            [Entry(INSTANCE_ID, "te1", TYPE, NOW - timedelta(days=9), Amount(12.3456), "CNY", ended=NOW)], "demo", NOW
        )
    ),
    "snapshots/show.py print_list": lambda *_: snapshots.print_list([SNAPSHOT], [DISK], GIB_PRICE),
    "snapshots/show.py print_phases": lambda *_: snapshots.print_phases([Phase("machines", 0.0, 1234.5)], 1234.5),
    "snapshots/show.py print_rebuild": lambda *_: snapshots.print_rebuild(
        Rebuild(UP, (Step("deploy", "base deploy", LONG, "12.30 CNY an hour, 49.20 CNY until 2026-01-31 15:45"),))
    ),
    "snapshots/show.py print_verdicts": lambda *_: snapshots.print_verdicts(
        [Decision(SNAPSHOT, True, f"{LONG} ({DISK_ID})")], GIB_PRICE
    ),
    "training/laptop/adapter/ask.py print_evaluation": lambda *_: an_evaluation(),
    "training/laptop/data_view.py show": lambda *_: some_data(),
    "training/laptop/models_on_nodes.py show": lambda *_: all_models(),
    "training/laptop/plan_view.py print_plan": lambda folder, _: all_plans(
        folder,
        lambda settings: plan_view.print_plan(
            plan_options.plan_question(settings, load_recipe("qwen2.5-14b"), PlanWish(hours=8.0))
        ),
    ),
    "training/laptop/prove/tasks.py _show": lambda *_: a_proof(),
    "training/laptop/rent_view.py print_choices": lambda folder, _: all_plans(
        folder,
        lambda settings: rent_view.print_choices(
            rent_options.rent_choices(settings, load_recipe("qwen2.5-3b"), PlanWish())
        ),
    ),
    "training/laptop/list_tasks.py list_runs": lambda _, patch: a_listed_run(patch),
    "training/laptop/status.py show": lambda *_: a_cluster(),
    "training/laptop/preparing.py check_report": lambda *_: preparing.check_report(CHECK, None, None),
    "training/laptop/status.py runs_table": lambda *_: status.runs_table([a_run()]),
    "training/laptop/start_run.py show_plan": lambda *_: start_run.show_plan(
        SimpleNamespace(
            checks=[Check("GPU memory", "error", f"23.1 of 22.1 GiB: {LONG}", f"--set lora.rank=8; {LONG}")]
        ),
        every_check=True,
    ),
}
"""By the file and the function that prints them."""


def whole(said, grid):
    """What may not wrap stands in one piece: cells, and of the columns of words the words."""
    for row in grid.rows:
        for name, cell in zip(grid.header, map(str, row), strict=True):
            for piece in cell.split() if name in grid.words else [cell]:
                assert piece in said, f"{name}: {piece!r} is cut in\n{said}"


@pytest.mark.parametrize("name", CASES)
def test_at_80_columns_only_words_wrap(name, monkeypatch, capsys, tmp_path):
    grids, render = [], Grid.__rich_console__

    def seen(self, *given):
        grids.append(self)
        return render(self, *given)

    monkeypatch.setattr(Grid, "__rich_console__", seen)
    monkeypatch.setattr(status, "under_notice", lambda cluster: [])
    monkeypatch.setattr(status, "disk_record", lambda head: None)
    monkeypatch.setattr(status.runs, "all_runs", lambda head: [])
    monkeypatch.setenv("COLUMNS", str(AT_80))
    monkeypatch.setenv("FORCE_COLOR", "1")  # for those that look different on a terminal
    monkeypatch.chdir(tmp_path)
    CASES[name](tmp_path, monkeypatch)
    said = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert any(grid.rows for grid in grids)
    for grid in tuple(grids):
        whole(said, grid)
        out = io.StringIO()
        console(file=out, width=AT_80, color_system=None).print(grid)
        assert max(map(len, out.getvalue().splitlines())) <= AT_80


def test_every_table_is_among_these():
    found = set()
    for path in (
        path for folder in ("deploy", "inventory", "snapshots", "training") for path in (ROOT / folder).rglob("*.py")
    ):
        if path == Path(terminal.__file__):
            continue
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = (each.func for each in ast.walk(function) if isinstance(each, ast.Call))
                if {"table", "terminal.table"} & {ast.unparse(call) for call in calls}:
                    found.add(f"{path.relative_to(ROOT)} {function.name}")
    assert found == set(CASES)


def drawn(width, header, rows, words=()):
    out = io.StringIO()
    console(file=out, width=width, color_system=None).print(table(header, rows, words))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_what_does_not_fit_beside_stands_below_its_row():
    rows = [[RUN, "running", "12.30 CNY", "-"], ["tiny-20260131-154500", "finished", "0.10 CNY", "3 d"]]
    assert drawn(46, ["run", "state", "cost", "age"], rows) == [
        "run                          state",
        f"{RUN}  running",
        "  cost: 12.30 CNY",
        "tiny-20260131-154500         finished",
        "  cost: 0.10 CNY  age: 3 d",
    ]
    assert len(drawn(80, ["run", "state", "cost", "age"], rows)) == 3


def test_words_wrap_between_words_and_not_inside_of_one():
    assert drawn(40, ["id", "why"], [[SNAPSHOT_ID, "older than the last three"]], {"why"}) == [
        "id",
        SNAPSHOT_ID,
        "  why: older than the last three",
    ]
    assert drawn(48, ["id", "why"], [[SNAPSHOT_ID, "older than the last three"]], {"why"}) == [
        "id                      why",
        f"{SNAPSHOT_ID}  older than the last",
        "                        three",
    ]


def test_wide_letters_are_counted_as_the_terminal_does():
    assert drawn(19, ["名称", "状态"], [["模型模型模型", "已完成"]]) == ["名称", "模型模型模型", "  状态: 已完成"]


def test_a_table_without_rows_is_its_heading():
    assert drawn(40, ["id", "why"], []) == ["id  why"]


def test_where_no_terminal_is_tables_are_wide_but_for_what_columns_says(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert console(file=io.StringIO()).width == terminal.WIDE
    monkeypatch.setenv("COLUMNS", "80")
    assert console(file=io.StringIO()).width == AT_80
