"""What `fab prove` concludes: from a kernel that leaks, a verdict that names another rank, a plan that was wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.heads import cluster_of
from tests.support.run_folders import going_on
from training.cost.cards import has_kernels
from training.laptop.head_node import HeadError, HereHead
from training.laptop.open_cluster import Session
from training.laptop.prove import conduct, drills
from training.laptop.run_look import RunLook
from training.run.causes import Cause
from training.run.events import Ended, Started, Told
from training.run.folder import Status
from training.run.outcome import Outcome, gathered, passed, read

ROOT = Path(__file__).parents[3]
RUN = "prove-20260101-000000"
needs_torch = pytest.mark.torch


@pytest.fixture(scope="module")
def devices():
    pytest.importorskip("deepspeed", reason="needs the [train] extra")
    from training.node.prove import devices

    return devices


@needs_torch
def test_the_stored_curve_is_what_one_process_on_a_cpu_computes(devices, tmp_path):
    from training.node.prove import curve

    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29878"}
    subprocess.run(
        [sys.executable, "-m", "tests.support.curve", str(tmp_path / "again.json")],
        cwd=ROOT,
        env={**os.environ, **place, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        timeout=180,
    )
    again = json.loads((tmp_path / "again.json").read_text())
    seen = curve.Curve(tuple(again["losses"]), tuple(again["norms"]))
    assert len(seen.losses) == curve.STEPS
    assert seen.apart(curve.stored()) < curve.TOLERANCE["cpu"]
    other = curve.Curve(tuple(loss * 1.0001 for loss in seen.losses), seen.norms)
    assert other.apart(curve.stored()) > curve.TOLERANCE["cpu"], "another curve would pass"


@needs_torch
def test_the_kernels_of_a_cpu_are_right_and_what_needs_a_gpu_is_said(devices):
    import torch

    outcomes, rates = devices.check_kernels(torch.device("cpu"))
    found = {outcome.name: outcome for outcome in outcomes}
    states = {name: outcome.state for name, outcome in found.items()}
    assert states == {"attention in packed rows": "pass", "our fused loss": "pass", "Liger's fused loss": "not here"}
    assert found["Liger's fused loss"].found == "no GPU" and rates == {}


@needs_torch
def test_a_card_without_bfloat16_is_tried_in_float16(devices, monkeypatch):
    import torch

    used = []
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for name in ("_attention", "_own_loss", "_liger"):
        monkeypatch.setattr(devices, name, lambda on, dtype=None, rates=None: used.append(dtype))
    devices.check_kernels(torch.device("cuda"))
    assert used == [torch.float16] * 3 and torch.float16 in devices.TOLERANCE
    operands = []
    monkeypatch.setattr(torch, "randn", lambda *_, dtype, **__: operands.append(dtype))
    monkeypatch.setattr(devices, "sustained", lambda *_: 1.0)
    devices._matmul_rate(torch.device("cuda"), {})
    assert operands == [torch.float16] * 2


@needs_torch
def test_the_matrix_rate_is_that_of_random_numbers_for_a_while(devices, monkeypatch):
    import torch

    spreads, product, began = [], torch.mm, time.perf_counter()
    monkeypatch.setattr(torch, "mm", lambda a, b: (spreads.append((a.std(), b.std())), product(a, b)))
    monkeypatch.setattr(devices, "SUSTAINED_S", {"cpu": (0.1, 0.2)}, raising=False)
    monkeypatch.setattr(devices, "SIDE", {"cpu": 64})
    rates = {}
    assert devices._matmul_rate(torch.device("cpu"), rates).state == "pass" and rates["matmul_flops"] > 0
    assert time.perf_counter() - began >= 0.3
    assert min(min(each) for each in spreads) > 0.9


@needs_torch
def test_attention_that_sees_its_neighbours_fails(devices, monkeypatch):
    import torch

    def leaky(module, query, key, value, mask, *, segments, sliding_window):
        whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return whole.transpose(1, 2), None

    monkeypatch.setattr(devices, "segment_attention", leaky)
    outcome = devices.check_kernels(torch.device("cpu"))[0][0]
    assert outcome.state == "fail" and "LEAKS" in outcome.found


def _breaks(*_, **__):
    raise RuntimeError("no kernel image is available\nmore")


@needs_torch
def test_a_kernel_that_breaks_is_a_row_and_the_others_are_tried(devices, monkeypatch):
    import torch

    monkeypatch.setattr(devices, "segment_attention", _breaks)
    rows = {outcome.name: outcome for outcome in devices.check_kernels(torch.device("cpu"))[0]}
    assert rows["attention in packed rows"].found == "RuntimeError: no kernel image is available"
    assert [row.state for row in rows.values()] == ["fail", "pass", "not here"]


@needs_torch
def test_on_a_card_too_old_its_capability_is_said_although_no_kernel_runs(devices, monkeypatch):
    import torch

    old = {"get_device_name": "Tesla V100", "get_device_capability": (7, 0), "get_arch_list": ["sm_75", "sm_80"]}
    for name, said in old.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=said: said)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    for name in ("_allocation", "_matmul_rate"):
        monkeypatch.setattr(devices, name, _breaks)
    copied = passed(devices.COPY, "400 GB/s")
    monkeypatch.setattr(devices, "_copy_rate", lambda on, rates: rates.update(memory_bytes_per_s=4e11) or copied)
    outcomes, rates = devices.measure_device(torch.device("cuda"))
    states = {outcome.name: outcome.state for outcome in outcomes}
    assert states["compute capability"] == states["matmul"] == "fail" and states["memory copy"] == "pass"
    assert (rates["card"], rates["memory_bytes_per_s"]) == ("Tesla V100", 4e11)
    assert conduct.calibrate({"rates": [rates]}, RUN, "mine", 9.0) is None


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 6), ["sm_80", "sm_90"], True),
        ((7, 0), ["sm_75", "sm_80", "compute_120"], False),
        ((12, 1), ["sm_80", "compute_120"], True),
        ((9, 0), ["sm_100", "sm_80"], False),
        ((10, 0), ["sm_90", "sm_100a"], True),
    ],
)
def test_a_wheel_runs_on_the_cards_it_has_code_for(capability, archs, runs):
    assert has_kernels(capability, archs) is runs


def judge(cause: Cause, rank: int, node: str, state: str = "failed") -> str:
    status = Status(RUN, state, "whatever it says", cause, failed_rank=rank, failed_node=node)
    seen = RunLook(status, alive=False, metrics=())
    return drills.named("a broken rank", seen, (3, "te4"), ("killed", "peer_lost"), 5).state


def test_a_verdict_passes_only_where_it_names_what_was_broken():
    killed = Cause("killed", signal=9)
    assert judge(killed, 3, "te4") == "pass"
    assert judge(Cause("peer_lost", peer=3), 0, "te1") == "pass", "a rank that fell silent is named by another"
    assert judge(Cause("peer_lost"), 1, "te2") == "fail"
    assert judge(Cause("crashed", code=1), 3, "te4") == "fail"
    assert judge(killed, 3, "te4", "finished") == "fail"
    assert drills.named("none", RunLook(None, False, ()), (3, "te4"), ("killed",), 5).state == "fail"


def test_a_rank_is_broken_by_the_pid_of_its_last_start():
    told = [Told(0, Started(10)), Told(1, Started(11)), Told(1, Started(21)), Told(1, Ended(0)), Told(11, Started(99))]
    assert drills.started_pid(told, 1) == 21
    with pytest.raises(drills.DrillError, match="rank 5 never said"):
        drills.started_pid(told, 5)


def test_what_a_node_sends_is_an_outcome_or_refused():
    row = {"name": "RAM", "state": "pass", "found": "19 GiB", "where": "rank 0"}
    assert read([row]) == [Outcome("RAM", "pass", "19 GiB", "rank 0")]
    for broken in ({**row, "state": "fine"}, {**row, "found": 7}, {"name": "RAM"}):
        with pytest.raises(ValueError, match="no outcome"):
            read([broken])


def rates(flops: float, card: str | None = "NVIDIA A10", **more: float) -> dict:
    return {"card": card, "matmul_flops": flops, "memory_bytes_per_s": 4e11, **more}


COMM = {
    "nodes": [{"node": "te1", "rank": 0}, {"node": "te2", "rank": 1}],
    "sweep": [{"operation": "all_gather", "busbw_gbyte_s": 1.5}, {"operation": "all_reduce", "busbw_gbyte_s": 3}],
}


def test_the_calibration_is_that_of_the_slowest_rank():
    ranks = [rates(56e12, ram_bytes=64e9), rates(51e12, ram_bytes=32e9)]
    made = conduct.calibrate({"rates": ranks, "comm": COMM}, RUN, "mine", 9.0)
    assert made is not None
    assert (made.matmul_flops, made.link_bytes_per_s, made.world_size, made.card) == (51e12, 1.5e9, 2, "NVIDIA A10")
    assert (made.ram_bytes, made.nodes) == (32e9, ("te1", "te2"))
    without = conduct.calibrate({"rates": [rates(56e12)]}, RUN, "mine", 9.0)
    assert without is not None and (without.link_bytes_per_s, without.ram_bytes, without.nodes) == (None, None, ())


@pytest.mark.parametrize(
    "found", [{}, {"rates": [rates(1), {}]}, {"rates": [rates(1), rates(1, "NVIDIA T4")]}], ids=["none", "one", "mixed"]
)
def test_ranks_without_rates_or_of_two_cards_calibrate_nothing(found):
    assert conduct.calibrate(found, RUN, "mine", 9.0) is None


FOUND = {"rates": [rates(56e12), rates(51e12)], "comm": COMM}


def proving(tmp_path, monkeypatch, drill) -> Session:
    """A prove whose first start came to something, and whose next starts find the head gone."""
    place = cluster_of(HereHead(tmp_path / "runs"))
    launch = place.launch_of(RUN, "training.node.prove.walk")
    launch = replace(launch, env={**launch.env, "DS_ACCELERATOR": "cuda"}, hosts=launch.hosts * 2)
    starts = iter([launch])

    def start(*_, **__):
        for first in starts:
            return first
        raise HeadError("te1 does not answer")

    Path(launch.run_dir).mkdir(parents=True)
    monkeypatch.setattr(conduct.new_run, "start_ranks", start)
    monkeypatch.setattr(conduct, "here_base_model", lambda *_: None)
    monkeypatch.setattr(conduct, "_results_of", lambda *_: (FOUND, [Outcome("RAM", "pass", "9 GiB")]))
    monkeypatch.setattr(drills.Drill, "start", lambda self: setattr(self, "run_id", RUN))
    monkeypatch.setattr(drills.Drill, "killed", lambda self: Outcome("SIGKILL of a rank", "pass", ""))
    monkeypatch.setattr(drills.Drill, "resumed_on_fewer", drill)
    monkeypatch.setattr(drills.runs, "look", start)
    monkeypatch.setattr(conduct, "real_steps", lambda *_: [conduct.against_plan("m", PREDICTED, [])])
    return place


def kept(place: Session) -> list[tuple[str, str]]:
    assert (place.head.runs / "calibration.json").is_file()
    rows = json.loads((place.head.runs / RUN / "prove.json").read_text())["outcomes"]
    return [(row["name"], row["state"]) for row in rows]


def test_what_breaks_late_is_a_row_and_all_before_it_is_kept(tmp_path, monkeypatch):
    place = proving(tmp_path, monkeypatch, _breaks_as_a_drill)
    proof = conduct.prove(place, "m", False, lambda _: None)
    assert kept(place) == [(row.name, row.state) for row in proof.outcomes]
    assert kept(place) == [
        ("RAM", "pass"),
        ("SIGKILL of a rank", "pass"),
        ("drill", "fail"),
        ("end of the drill", "fail"),
        ("3 steps of m", "fail"),
    ]


@needs_torch
def test_what_was_found_before_a_part_broke_is_kept(devices, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from training.node.prove import walk

    def strategies(self):
        yield passed("zero0", "")
        raise RuntimeError("the others never came")

    (tmp_path / walk.ASKED).write_text('{"quick": true}')
    monkeypatch.setattr(walk, "init_process_group", lambda *_: None)
    for part in ("devices", "network"):
        monkeypatch.setattr(walk.Walk, part, lambda self: [])
    monkeypatch.setattr(walk.Walk, "strategies", strategies)
    place = SimpleNamespace(local_rank=0)
    progress = SimpleNamespace(enter=lambda *_: None)
    rank = SimpleNamespace(run_dir=tmp_path, place=place, is_head=True, progress=progress, say=lambda _: None)
    with pytest.raises(RuntimeError, match="never came"):
        walk.Walk(rank).whole()
    found = json.loads((tmp_path / "result.json").read_text())
    assert [row["name"] for row in found["outcomes"]] == ["zero0"] and found["done"] is False


def test_ctrl_c_keeps_what_is_there(tmp_path, monkeypatch):
    place = proving(tmp_path, monkeypatch, _interrupted)
    with pytest.raises(KeyboardInterrupt):
        conduct.prove(place, "", False, lambda _: None)
    assert kept(place)[-1] == ("SIGKILL of a rank", "pass")


def test_ctrl_c_ends_the_run_that_was_started_and_no_other(tmp_path, monkeypatch):
    place = cluster_of(HereHead(tmp_path))
    with going_on(tmp_path, "tiny-20260101-000000") as other, ExitStack() as started:

        def proof(*_):
            programs.append(started.enter_context(going_on(tmp_path, RUN)))
            raise KeyboardInterrupt

        programs: list[subprocess.Popen] = []
        monkeypatch.setattr(conduct, "_proof", proof)
        monkeypatch.setattr(conduct, "here_base_model", lambda *_: None)
        monkeypatch.setattr(conduct.start_lock, "refuse_second", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            conduct.prove(place, "", False, lambda _: None)
        assert programs[0].wait(60) == -signal.SIGTERM and other.poll() is None


def _breaks_as_a_drill(self):
    raise drills.DrillError("rank 3 never said that it started")


def _interrupted(self):
    raise KeyboardInterrupt


PREDICTED = {"card": "NVIDIA A10", "memory_gib": 16.0, "step_s": 10.0}


@pytest.mark.parametrize(
    ("reserved", "step_s", "states"),
    [(17.0, 12.0, ["pass", "pass"]), (20.0, 12.0, ["fail", "pass"]), (17.0, 31.0, ["pass", "fail"])],
)
def test_a_real_run_is_held_against_its_plan(reserved, step_s, states):
    steps = [
        {"memory_gib": 15.0, "memory_reserved_gib": reserved, "step_s": seconds} for seconds in (90.0, step_s, step_s)
    ]
    assert [outcome.state for outcome in conduct.against_plan("m", PREDICTED, steps)] == states


def test_without_a_planned_pace_seconds_are_only_told():
    steps = [{"memory_gib": 1.0, "step_s": 2.0}]
    memory, pace = conduct.against_plan("m", {"card": None, "memory_gib": 1.5, "step_s": None}, steps)
    assert (memory.state, pace.state) == ("pass", "not here")
    assert "2.00 s" in pace.found


def test_what_ranks_say_in_the_same_words_is_one_row():
    said = [Outcome("Liger", "not here", "no GPU", f"rank {n}") for n in range(3)]
    rows = gathered([*said, Outcome("RAM", "pass", "1 GiB", "rank 0"), Outcome("RAM", "pass", "2 GiB", "rank 1")])
    assert [(row.name, row.where) for row in rows] == [("Liger", "3 ranks"), ("RAM", "rank 0"), ("RAM", "rank 1")]


def test_a_resume_is_judged_by_steps_of_its_own(monkeypatch):
    """Until the new ranks are there, metrics.jsonl is that of the start before: it agrees with itself."""
    drill = drills.Drill(Session(HereHead(Path("runs"))), print, RUN, before={5: 1.0, 6: 1.1, 7: 1.2})
    waited: list[int] = []
    monkeypatch.setattr(drills.runs, "whole_checkpoint", lambda *_: (5, []))
    monkeypatch.setattr(drills.resume_run, "resume", lambda *_, **__: RUN)
    monkeypatch.setattr(drill, "wait_for_step", waited.append)
    monkeypatch.setattr(drill, "losses", lambda: {5: 1.0, 6: 1.1, 7: 1.2, 8: 1.3})
    assert drill.goes_on("resume", drill.cluster).state == "pass"
    assert waited == [8]
    monkeypatch.setattr(drill, "losses", lambda: {5: 1.0, 6: 1.1, 7: 1.21, 8: 1.3})
    assert drill.goes_on("resume", drill.cluster).state == "fail"
    monkeypatch.setattr(drills.runs, "whole_checkpoint", lambda *_: (7, []))
    outcome = drill.goes_on("resume", drill.cluster)
    assert outcome.state == "fail" and "0 steps done again" in outcome.found, "nothing was compared"


def test_a_run_is_killed_where_it_has_steps_to_lose(monkeypatch):
    drill = drills.Drill(Session(HereHead(Path("runs"))), print, RUN)
    steps = iter([10, drill.every, 2 * drill.every - 1, 2 * drill.every, 2 * drill.every + 3, 0])
    monkeypatch.setattr(drills.runs, "look", lambda *_: RunLook(None, True, ({"step": next(steps)},)))
    monkeypatch.setattr(drills.time, "sleep", lambda _: None)
    drill.wait_for_steps_to_lose()
    assert next(steps) == 0
