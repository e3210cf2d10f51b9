"""Ranks started by the launchers of others, on real hosts: what a run says and what it learns stays the same."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.local_cluster import RANKS, DisturbedRun, LocalCluster, run_id_in
from tests.support.waiting import until
from training.run.launchers import TYPED

pytestmark = [pytest.mark.localcloud, pytest.mark.torch, pytest.mark.proof]
pytest.importorskip("alibabacloud_tea_openapi", reason="needs the [aliyun] extra: the vendor's SDK")

NAMES = ["te1", "te2"]
STEPS, SAVE_EVERY = 16, 4
FLAGS = ["--model", "tiny", "--steps", STEPS, "--set", f"save_every={SAVE_EVERY}", "--set", "lora.dropout=0"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two hosts; on the second an administrator has set things for all users."""
    local = LocalCluster(tmp_path_factory.mktemp("launchers"), name="launch", subnet="10.213.87.0/24")
    by(local, "mpirun")
    local.leave()
    local.serve()
    local.up()
    code, _, log = local.deploy()
    assert code == 0, log[-4000:]
    local.on("te2", "printf 'TZ=Asia/Shanghai\\nUCX_TLS=tcp\\nCUDA_VISIBLE_DEVICES=7\\n' >> /etc/environment")
    yield local
    local.leave()


def by(local, launcher):
    text = local.toml.read_text().partition("[launch]")[0]
    local.toml.write_text(f'{text}[launch]\nlauncher = "{launcher}"\n')


def environment_on(run, name):
    """Of the rank there, without what tells it its place."""
    words = run.local.on(name, f"cat /proc/$(pgrep '{RANKS}')/environ").split("\0")
    env = dict(word.split("=", 1) for word in words if word)
    for each in ("RANK", "CROSS_RANK", "MASTER_PORT", "SPOTUNE_RUN", "SPOTUNE_EVENTS", "DS_ENV_FILE"):
        env.pop(each, None)
    return {each: value for each, value in env.items() if not each.startswith("TORCHELASTIC_")}


def losses(local, run_id):
    rows = map(json.loads, local.on("te1", f"cat /data/runs/{run_id}/metrics.jsonl").splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def known():
    """What the launchers before have shown."""
    return {}


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_a_rank_killed_is_named_and_the_run_goes_on_to_the_same_end(cluster, known, launcher):
    by(cluster, launcher)
    run = DisturbedRun(cluster, *FLAGS)
    run.wait_beyond(SAVE_EVERY)
    environments = {name: environment_on(run, name) for name in NAMES}
    cluster.on("te2", f"pkill -KILL '{RANKS}'")
    status = run.wait_until_failed(within_s=60)
    assert (status["failed_node"], status["failed_rank"]) == ("te2", 1)
    assert (status["cause"]["kind"], status["cause"]["signal"]) == ("killed", 9)
    assert {name: run.ranks_on(name) for name in NAMES} == {"te1": [], "te2": []}
    assert {"CUDA_VISIBLE_DEVICES", "UCX_TLS"} <= {*cluster.fab("logs", "--all", "--run", run.run_id).stdout.split()}
    run.resume()
    until(lambda: run.status()["state"] == "finished", "the end of the run", 120)
    assert environments["te2"] == environments["te1"] | {"TZ": "Asia/Shanghai"}
    assert known.setdefault("environment", environments["te1"]) == environments["te1"]
    learned = losses(cluster, run.run_id)
    assert known.setdefault("losses", learned) == learned and max(learned) == STEPS


@pytest.mark.parametrize("launcher", TYPED)
def test_lines_that_are_typed_on_each_node_train_without_ssh_between_them(cluster, known, launcher):
    try:
        for name in NAMES:
            cluster.on(name, "chmod 0 /usr/bin/ssh")
        done = cluster.fab("train", *FLAGS, "--print", launcher)
        assert done.returncode == 0, done.stdout
        lines = [line for line in done.stdout.splitlines() if line.startswith("cd ")]
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(cluster.on, timeout=200), NAMES, lines))
    finally:
        for name in NAMES:
            cluster.on(name, "chmod 755 /usr/bin/ssh")
    run_id = run_id_in(done.stdout)
    learned = losses(cluster, run_id)
    assert known.setdefault("losses", learned) == learned and max(learned) == STEPS
    fetched = cluster.fab("fetch", "--run", run_id)
    assert fetched.returncode == 0 and f"step {STEPS};" in fetched.stdout, fetched.stdout
