"""A token is on the disk before the call that uses it, and is used again exactly where nobody knows the outcome."""

import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.renting import intents as module
from inventory.renting.intents import Intents, digest

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Order:
    amount: int
    at: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    labels: tuple = (("a", 1),)


@pytest.fixture
def intents(tmp_path):
    return Intents(tmp_path / "clusters" / "c1" / "intents.json")


def test_an_intent_is_on_the_disk_while_the_call_runs_and_gone_after_it(intents):
    with intents.begun("run", Order(2)) as token:
        other = Intents(intents.path).pending()
        assert other["run"].token == token and other["run"].digest == digest(Order(2))
    assert intents.pending() == {}


def test_only_the_owner_may_read_it(intents):
    with intents.begun("run", Order(2)):
        for path in intents.path.parent.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(intents.path.parent.stat().st_mode) == 0o700


def leave(intents, error, order=Order(2), key="run"):
    with pytest.raises(type(error)), intents.begun(key, order) as token:
        raise error
    return token


@pytest.mark.parametrize("kind", [Kind.PASSING, Kind.THROTTLED])
def test_no_answer_keeps_the_token_for_the_same_order(intents, kind):
    first = leave(intents, CloudError("no answer", kind))
    with intents.begun("run", Order(2)) as again:
        assert again == first
    with intents.begun("run", Order(2)) as new:
        assert new != first


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.PASSING, Kind.THROTTLED}, key=str))
def test_a_definite_refusal_ends_the_intent(intents, kind):
    first = leave(intents, CloudError("no", kind))
    assert intents.pending() == {}
    with intents.begun("run", Order(2)) as new:
        assert new != first


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("crash"), SystemExit(1)])
def test_a_crash_keeps_the_token(intents, error):
    first = leave(intents, error)
    with intents.begun("run", Order(2)) as again:
        assert again == first


def test_another_order_gets_another_token(intents):
    first = leave(intents, CloudError("no answer", Kind.PASSING))
    with intents.begun("run", Order(3)) as other:
        assert other != first


def test_orders_of_two_names_do_not_disturb_each_other(intents):
    first = leave(intents, CloudError("no answer", Kind.PASSING), key="run te1")
    with intents.begun("run te2", Order(2)) as second:
        assert set(intents.pending()) == {"run te1", "run te2"} and second != first
    assert set(intents.pending()) == {"run te1"}


def test_an_old_intent_is_not_repeated(intents, monkeypatch):
    first = leave(intents, CloudError("no answer", Kind.PASSING))
    monkeypatch.setattr(module, "REMEMBERED_S", 0)
    with intents.begun("run", Order(2)) as new:
        assert new != first


def test_equal_requests_have_equal_digests():
    assert digest({"b": Order(1), "a": [1, "x"]}) == digest({"a": [1, "x"], "b": Order(1)})
    assert digest(Order(1)) != digest(Order(1, at=datetime(2026, 1, 3, tzinfo=UTC)))
    assert digest({"a": {"y", "x"}}) == digest({"a": {"x", "y"}})


def test_a_damaged_file_is_named(intents):
    intents.path.parent.mkdir(parents=True)
    intents.path.write_text("[1, 2")
    with pytest.raises(RentError, match=r"intents\.json is damaged"):
        intents.pending()


HOLD = """
import signal, sys
from pathlib import Path
from inventory.renting.intents import Intents
intents = Intents(Path(sys.argv[1]))
with intents.alone(), intents.begun("run", {"amount": 2}) as token:
    print(token, flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(intents):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(intents.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()


def test_two_at_once_are_refused_and_the_other_is_named(intents, holder):
    process, _ = holder
    with pytest.raises(RentError, match=f"process {process.pid}"), intents.alone():
        pass


def test_a_killed_process_leaves_its_token_and_frees_the_cluster(intents, holder):
    process, token = holder
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with intents.alone(), intents.begun("run", {"amount": 2}) as again:
        assert again == token


def test_many_at_once_lose_nothing(intents):
    code = (
        "import sys; from pathlib import Path; from inventory.renting.intents import Intents\n"
        "for n in range(20):\n"
        "    manager = Intents(Path(sys.argv[1])).begun(f'{sys.argv[2]}-{n}', n)\n"
        "    manager.__enter__()\n"
        "    globals()[f'kept{n}'] = manager\n"
        "import os; os._exit(0)\n"
    )
    several = [subprocess.Popen([sys.executable, "-c", code, str(intents.path), name], cwd=ROOT) for name in "abc"]
    assert [process.wait() for process in several] == [0, 0, 0]
    assert len(intents.pending()) == 60


FULL = """
import resource, signal, sys
from pathlib import Path
from inventory.cloud.errors import RentError
from inventory.renting.intents import Intents
intents = Intents(Path(sys.argv[1]))
intents.begun("first", 1).__enter__()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    for n in range(9):
        intents.begun(f"order {n}", n).__enter__()
except RentError as error:
    print(n, error)
import os; sys.stdout.flush(); os._exit(0)
"""


def test_a_disk_that_is_full_leaves_the_intents_whole_and_nothing_is_ordered(intents):
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(intents.path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    said, _, sentence = ran.stdout.partition(" ")
    assert "cannot be written (File too large): what is about to be ordered must be on the disk first" in sentence
    assert list(intents.pending()) == ["first", *(f"order {n}" for n in range(int(said)))]
    assert not intents.path.with_suffix(".half").exists()
