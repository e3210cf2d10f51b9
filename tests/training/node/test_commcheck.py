"""The communication check with two real gloo ranks, and with sums broken on purpose."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.ports import free_pair
from tests.support.rank_output import outputs as said_by
from training.run import comm_report

ROOT = Path(__file__).parents[3]


def run_ranks(code: list[str], folder: Path, world: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as `world` ranks on the loopback interface."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_pair()),
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": programs.PATH,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *code, "--run", str(folder)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = said_by(ranks, 120)
    return [subprocess.CompletedProcess(r.args, r.returncode, out) for r, out in zip(ranks, outputs, strict=True)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("torch", reason="needs the [train] extra")
    folder = tmp_path_factory.mktemp("check-20260101-000000")
    (folder / "plan.json").write_text('{"cluster": "mine"}')
    for done in run_ranks(["-m", "training.node.commcheck"], folder):
        assert done.returncode == 0, done.stdout
    return comm_report.parse_result((folder / "result.json").read_text())


@pytest.mark.torch
def test_two_gloo_ranks_pass_every_operation_in_every_dtype(result):
    assert (result["backend"], result["cluster"]) == ("gloo", "mine")
    assert not comm_report.wrong_results(result)
    operations = {line.split(":")[0] for line in comm_report.check_lines(result)}
    assert operations == {"broadcast", "all-reduce", "all-gather", "reduce-scatter", "send/recv ring"}
    assert {check["dtype"] for check in result["checks"]} == {"float32", "bfloat16", "int64"}


@pytest.mark.torch
def test_the_interface_in_use_is_seen_and_not_just_believed(result):
    assert [list(node["interfaces_used"]) for node in result["nodes"]] == [["lo"], ["lo"]]


@pytest.mark.torch
def test_the_sweep_has_plausible_numbers(result):
    for operation in ("all_reduce", "all_gather"):
        rows = [row for row in result["sweep"] if row["operation"] == operation]
        assert len(rows) >= 4
        assert [row["bytes"] for row in rows] == sorted(row["bytes"] for row in rows)
        assert 0.01 < comm_report.best_busbw(result, operation) < 200
    factor = {row["operation"]: row["busbw_gbyte_s"] / row["algbw_gbyte_s"] for row in result["sweep"]}
    assert factor == {"all_reduce": pytest.approx(1.0), "all_gather": pytest.approx(0.5)}


BROKEN_SUM = """
import sys, torch.distributed as dist
from training.node import commcheck
real = dist.all_reduce
def broken(tensor, *args, **kwargs):
    if kwargs.get("op") is None:
        {fault}
    else:
        real(tensor, *args, **kwargs)
dist.all_reduce = broken
commcheck.PAIRS_BUDGET_S = commcheck.SWEEP_BUDGET_S = 0.1
sys.exit(commcheck.main())
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "fault",
    [
        "tensor.mul_(2)",  # every rank counts itself twice and nobody else
        "real(tensor, *args, **kwargs); tensor.copy_(tensor.roll(1))",
        "real(tensor, *args, **kwargs); tensor[-1] += 1",
    ],
)
def test_a_broken_sum_is_found(fault: str, tmp_path: Path):
    pytest.importorskip("torch", reason="needs the [train] extra")
    run_ranks(programs.forked(BROKEN_SUM.format(fault=fault))[1:], tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    wrong = {check["operation"] for check in result["checks"] if not check["ok"]}
    assert wrong == {"all-reduce"}


def test_our_established_connections_count_and_neither_listeners_nor_those_of_others_do():
    interfaces = pytest.importorskip("training.node.commcheck", reason="needs the [train] extra")
    before = interfaces.interfaces_in_use().get("lo", 0)
    stranger = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert interfaces.interfaces_in_use().get("lo", 0) == before
        argv = [sys.executable, "-c", stranger, str(port)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as other, listener.accept()[0]:
            with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
                assert interfaces.interfaces_in_use()["lo"] == before + 3  # both ends of ours, one of the other's
            other.communicate()


def test_joining_waits_longer_than_a_collective_does(monkeypatch: pytest.MonkeyPatch):
    """A node whose disk is cold imports torch for a minute; the others were gone by then."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    from datetime import timedelta

    from training.node import commcheck

    assert commcheck.JOINING == timedelta(seconds=180) > commcheck.TIMEOUT
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_pair(), "WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}
    for key, value in place.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(commcheck, "JOINING", timedelta(seconds=2))
    monkeypatch.setattr(commcheck, "TIMEOUT", timedelta(seconds=0.1))
    began = time.monotonic()
    with pytest.raises(RuntimeError):  # nobody else comes
        commcheck.join()
    assert time.monotonic() - began > 1.5


def test_a_slow_ping_makes_no_pair_fast(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch", reason="needs the [train] extra")
    from training.node import commcheck

    seconds = {4: 0.5}  # a hiccup of a shared machine; all else takes 50 ms
    monkeypatch.setattr(commcheck, "_transfer_s", lambda _, a, b, size, budget_s: seconds.get(size, 0.05))
    for collective in ("barrier", "broadcast"):
        monkeypatch.setattr(commcheck.dist, collective, lambda *_, **__: None)
    pair = commcheck.measure_pair(commcheck.Group(0, 2, torch.device("cpu"), "gloo"), 0, 1, 1.0)
    assert pair["gbit_s"] == pytest.approx(pair["bytes"] * 8 / 0.05 / 1e9)
