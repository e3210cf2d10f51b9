"""A rank's place, in the names of each launcher."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from training.run.place import (
    LAUNCHERS,
    MASTERS,
    PORTS,
    SCHEDULERS,
    NodePlace,
    PlaceError,
    RankPlace,
    node_place_of,
    place_of,
)

SECOND_OF_FOUR = RankPlace(1, 4, 1, 2, "10.0.0.1", 29501)
WITH_A_MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: names.launcher)
def test_every_launchers_names_say_the_same(names):
    environ = {names.rank: "1", names.world_size: "4", names.local_rank: "1", names.local_world_size: "2"}
    assert place_of(dict.fromkeys(names.needs, "0") | environ | WITH_A_MASTER) == SECOND_OF_FOUR
    assert place_of(SECOND_OF_FOUR.variables) == SECOND_OF_FOUR


def test_a_process_that_nobody_launched_is_alone():
    assert place_of({"PATH": "/bin"}) == RankPlace(0, 1, 0, 1, "127.0.0.1", 29500)


def test_a_batch_script_of_slurm_is_no_rank_of_its_job():
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[07-10]"}
    assert place_of(job) == RankPlace()
    assert place_of(job | {"SLURM_STEP_ID": "0"}) == RankPlace(0, 4, 0, 1, "gpu07", 29500)


def test_srun_that_also_sets_some_names_of_mpi_counts():
    names = {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    assert place_of({**names, "SLURM_LOCALID": "1", "MASTER_ADDR": "te1"}).local_rank == 1


def test_ranks_of_torchrun_meet_behind_its_agents_store():
    names = SECOND_OF_FOUR.variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert place_of(names) == replace(SECOND_OF_FOUR, master_port=29503)


def test_mpirun_inside_a_job_of_slurm_counts():
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "MASTER_ADDR": "te1"}
    ranks = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert place_of(job | ranks) == RankPlace(3, 4, 1, 2, "te1", 29500)


@pytest.mark.parametrize(
    ("name", "value", "first"),
    [
        ("PET_MASTER_ADDR", "trainer-node-0-0.trainer", "trainer-node-0-0.trainer"),
        ("DSTACK_MASTER_NODE_IP", "10.0.0.5", "10.0.0.5"),
        ("SKYPILOT_NODE_IPS", "10.0.0.7\n10.0.0.8\n", "10.0.0.7"),
        ("SLURM_JOB_NODELIST", "te[3-4,9],other", "te3"),
        ("SLURM_JOB_NODELIST", "te3,te4", "te3"),
        ("SLURM_JOB_NODELIST", "rack[1-2]n[3,5]-ib,te9", "rack1n3-ib"),
    ],
)
def test_the_ranks_meet_on_the_first_node_that_their_scheduler_names(name, value, first):
    assert place_of({"RANK": "0", "WORLD_SIZE": "2", name: value}).master_address == first


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({"RANK": "0"}, "WORLD_SIZE=nothing"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "-1"}, "MASTER_PORT=-1"),
    ],
)
def test_what_no_launcher_would_say_is_refused_with_its_name(environ, named):
    with pytest.raises(PlaceError, match=re.escape(named)):
        place_of(environ)


@pytest.mark.parametrize("names", SCHEDULERS, ids=lambda names: names.scheduler)
def test_every_schedulers_names_say_which_node_this_is(names):
    environ = {names.node_rank: "1", names.nodes: "2"}
    assert node_place_of(environ, 2, "te1") == NodePlace(1, "te1", 29500)
    assert node_place_of(environ | WITH_A_MASTER, 2, "te1") == NodePlace(1, "10.0.0.1", 29501)


def test_a_single_node_needs_no_scheduler():
    assert node_place_of({}, 1, "te1") == NodePlace(0, "te1", 29500)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, "NODE_RANK=nothing"),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4"}, "SKYPILOT_NUM_NODES=4"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2"),
    ],
)
def test_a_node_that_is_none_of_the_run_is_refused(environ, named):
    with pytest.raises(PlaceError, match=re.escape(named)):
        node_place_of(environ, 2, "te1")


def test_the_page_has_every_name():
    page = (Path(__file__).parents[3] / "docs" / "launching.md").read_text(encoding="utf-8")
    rows = [
        f"| `{names.rank}` | `{names.world_size}` | `{names.local_rank}` | `{names.local_world_size}` |"
        for names in LAUNCHERS
    ]
    rows += [f"| `{names.node_rank}` | `{names.nodes}` |" for names in SCHEDULERS]
    assert [row for row in rows if row not in page] == []
    assert [name for name in (*MASTERS, *PORTS) if f"`{name}`" not in page] == []
