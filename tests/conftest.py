"""What tests share. On CI a skip is a failure, but for the reasons in tests/support/skips.py."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

from tests.support import programs
from tests.support.skips import GPU, ON_CI

# Several workers share few cores, and two threads of torch on a busy core wait for each other ten times as long as one
# works. Set before anything imports torch; ranks get their own number from the launch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test compiles with torch. Without this bitsandbytes loads the compiler, which takes each process a second, and on
# imitated cards compiles its kernels for CPUs.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Where no terminal is what is printed is wide, unless this says otherwise: as it does in xdist's workers.
os.environ.pop("COLUMNS", None)
# No test tells the developer's own chats what it does.
os.environ["SPOTUNE_NOTIFY"] = ""

LONGEST_FIRST = (
    "stories/test_cluster.py",
    "stories/test_cycle.py",
    "gpu/test_rehearsal.py",
    "training/node/test_strategies.py",
    "training/node/test_pipeline.py",
    "training/laptop/test_folder_model.py",
    "proof/test_types_zero3.py",
    "proof/test_drill_rebuild.py",
    "proof/test_drill_faults.py",
    "inventory/localcloud/test_ecs_hosts.py",
    "inventory/localcloud/test_hosts.py",
    "training/node/test_engine.py",
    "training/node/test_endings.py",
    "training/laptop/test_second_stage.py",
    "proof/test_slow_links.py",
    "training/node/test_fake_cuda.py",
    "training/node/test_experts_ranks.py",
    "training/node/test_nf4_ranks.py",
    "training/laptop/test_models_add.py",
    "proof/test_dpo_trl.py",
    "training/node/adapter/test_pipeline.py",
    "training/node/test_checkpoint_saver.py",
    "training/node/test_alone.py",
    "deploy/test_python_env.py",
    "proof/test_drill_kill.py",
    "proof/test_drill_kept.py",
)
"""Files of a minute and more. A file is one worker's (`--dist loadfile`), so a long one begun late is waited for alone;
`--quick` leaves them out."""

PROOF_FILES = ("stories/test_cluster.py", "gpu/test_rehearsal.py", "proof/test_dpo_trl.py", "proof/test_slow_links.py")
"""Four hosts, `make gpu` on the imitated card, parity with TRL, slow links: `make proof` alone runs them."""
REPRESENTATIVES = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "ministral3")
"""Of the model types of a test marked so: what `make test` runs, and `make proof` the others."""
DRILL_FILES = ("proof/test_drill_faults.py", "proof/test_drill_kept.py", "proof/test_drill_rebuild.py")
"""Of these `make test` runs one case in TENTH, always the same, and `make proof` the others and the pages."""
TENTH = 10

TRAIN = ("torch", "transformers", "deepspeed", "peft")

HERE = Path(__file__).parent
ACCEPTANCE = HERE / "acceptance"


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="no file that needs hosts, torch or other processes: make quick"
    )


def pytest_configure(config):
    if config.option.markexpr != "gpu":  # tests of what is computed without a card, on a machine with one too
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "linux" and not hasattr(config, "workerinput") and not config.getoption("quick"):
        for server in programs.serve():
            config.add_cleanup(server.stdin.close)
    if config.getoption("quick"):
        config.option.markexpr = "not torch and not localcloud and not gpu"
        # as if the [train] extra were not there: collecting alone would import torch for many seconds in each worker
        sys.modules.update(dict.fromkeys(TRAIN))


def pytest_ignore_collect(collection_path, config):
    """tests/acceptance looks at the machines ./cluster.toml names: only where the command line asks for it."""
    if config.getoption("quick") and collection_path.suffix == ".py" and takes_long(collection_path):
        return True
    if collection_path != ACCEPTANCE:
        return None
    asked = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(path.is_relative_to(ACCEPTANCE) for path in asked) else True


def place(path):
    """A file's path in tests/, as the lists above name it; elsewhere as it is."""
    return path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else str(path)


def takes_long(path):
    return place(path) in LONGEST_FIRST or "import subprocess" in path.read_text(encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # what is imported stays: looking for what does not takes each worker a second
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Workers take files in this order where xdist does not reorder them (--no-loadscope-reorder)."""
    places = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(place(item.path), len(places)))
    for item in items:
        if is_proof(item):
            item.add_marker("proof")


def is_proof(item):
    file, parameters = place(item.path), item.callspec.params if hasattr(item, "callspec") else {}
    if item.get_closest_marker("representatives"):
        return parameters["kind"] not in REPRESENTATIVES
    if file in DRILL_FILES:
        return "kind" not in parameters or crc32(item.name.encode()) % TENTH != 0
    return file in PROOF_FILES


def pytest_terminal_summary(terminalreporter):
    """The files that took longest, setup and teardown counted: which order and which tier they belong to."""
    took = Counter()
    for report in (each for kind in terminalreporter.stats.values() for each in kind if hasattr(each, "duration")):
        took[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"seconds by file, {sum(took.values()):.0f} in all")
    for name, seconds in took.most_common(60):
        terminalreporter.write_line(f"{seconds:7.1f}  {name}")


def pytest_runtest_setup(item):
    if item.get_closest_marker("torch") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs the [train] extra: pip install -e '.[train]'")
    if item.get_closest_marker("trl") and importlib.util.find_spec("trl") is None:
        pytest.skip("needs the [trl] extra: pip install -e '.[trl]'")
    if item.get_closest_marker("localcloud"):
        from inventory.localcloud.prerequisites import missing_prerequisites

        missing = missing_prerequisites()
        if missing:
            pytest.skip("the local cloud cannot run here: " + "; ".join(missing))
    if item.get_closest_marker("fake_cuda"):
        from tests.support.fake_cuda.loader import missing

        if lacks := missing():
            pytest.skip(lacks)
    if item.get_closest_marker("gpu") and importlib.util.find_spec("torch") is None:
        pytest.skip(GPU)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return failed_on_ci((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return failed_on_ci((yield), collector.config)


def failed_on_ci(report, config):
    """On CI, the report of a skipped test or file as that of a failed one, whatever skipped it: a mark, a fixture,
    `importorskip`. `--quick` leaves out on purpose."""
    if os.environ.get("CI") and not config.getoption("quick") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in ON_CI:
            report.outcome, report.longrepr = "failed", f"CI must run this: {reason}"
    return report


@pytest.fixture
def server():
    """A real ssh server of this process; `node` may come in."""
    from tests.support.ssh_server import SshServer

    with SshServer() as server:
        yield server


@pytest.fixture
def node(server, tmp_path_factory, monkeypatch):
    """The node that `server` plays."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return server.node(tmp_path_factory.mktemp("ssh"))
