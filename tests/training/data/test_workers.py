"""Data prepared by several processes: in order, the same to the byte, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from training.data import workers
from training.data.build import Build
from training.data.encode import Encoder
from training.data.sample import Bad, DataError
from training.data.source import data_of
from training.data.statistics import DataStatistics
from training.data.survey import quiet, survey
from training.data.workers import in_order, processes_for
from training.models import tiny
from training.models.names import load_recipe

ROOT = Path(__file__).parents[3]


def test_results_come_in_the_order_of_the_pieces_and_few_pieces_are_read_ahead():
    read = []

    def pieces():
        for number in range(40):
            read.append(number)
            yield number

    def work(number):
        time.sleep(0.05 if number % 2 == 0 else 0)
        return number, os.getpid()

    results = in_order(work, pieces(), 2)
    first, _ = next(results)
    assert first == 0 and len(read) <= 6
    rest = list(results)
    assert [number for number, _ in rest] == list(range(1, 40))
    assert os.getpid() not in {pid for _, pid in rest}


def test_an_error_is_raised_in_its_turn_and_a_killed_process_is_a_data_error():
    def work(number):
        if number == 3:
            raise DataError("three")
        return number

    results = in_order(work, range(10), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="three"):
        next(results)
    with pytest.raises(DataError, match="killed"):
        list(in_order(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(10), 2))


def test_its_processes_end_with_a_parent_that_is_killed():
    code = (
        "import os, sys, time\n"
        "from training.data.workers import in_order\n"
        "for one in in_order(lambda n: n and time.sleep(600), range(9), 2): print('at work', flush=True)"
    )
    read_end, held = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, pass_fds=(held,))
    os.close(held)
    assert parent.stdout.readline() == b"at work\n"
    parent.kill()
    parent.communicate()
    gone, _, _ = select.select([read_end], [], [], 60)
    assert gone and os.read(read_end, 1) == b"", "every process that held the other end is gone"
    os.close(read_end)


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny.tokenizer(), 64, "assistant")


def _lines(count):
    for number in range(count):
        answer = "" if number % 97 == 5 else f"answer {number} " * (number % 40 + 1)
        turns = [{"role": "user", "content": f"question {number % 500}"}, {"role": "assistant", "content": answer}]
        yield json.dumps({"messages": turns}) + "\n"


def _built(source, encoder, folder, skip=True):
    recipe = load_recipe("tiny", {"validation.fraction": "0.1"})
    bad = Bad(skip)
    statistics = DataStatistics(survey(data_of(source), quiet).records, 2, quiet)
    reports = Build(encoder, recipe, folder, bad, statistics).run(data_of(source), "")
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return reports, files, bad.shown, statistics.picked


def test_several_processes_make_the_same_as_one_to_the_byte(tmp_path, encoder, monkeypatch):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(_lines(1500)), "utf-8")
    assert processes_for(data_of(source).files) == 1
    alone = _built(source, encoder, tmp_path / "alone")
    monkeypatch.setattr(workers, "WORTH", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert processes_for(data_of(source).files) == 3
    assert _built(source, encoder, tmp_path / "several") == alone
    assert alone[0]["train"].bad == 16


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("last", ['{"text": "once"}\n', '{"chosen": "a", "rejected": "b", "prompt": "c"}\n'])
def test_the_first_fault_of_the_data_is_told(tmp_path, encoder, monkeypatch, processes, last):
    source = tmp_path / "a.jsonl"
    source.write_text("".join([*_lines(300), last, '{"prompt": "p", "completion": "c"}\n']), "utf-8")
    monkeypatch.setattr(workers, "WORTH", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    with pytest.raises(DataError, match=r"line 301: .*, but the records before are messages"):
        _built(source, encoder, tmp_path / "made")
