"""A look on the head: the node's program, started as every other one is, over a head that is this machine."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

pytest.importorskip("deepspeed", reason="needs the [train] extra")

from inventory.node_program import ProgramRefused
from training.data.look.content import remarks
from training.laptop import data_size, data_view
from training.laptop.base_model import TINY_CODE
from training.laptop.data_view import Question
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.models import tiny
from training.models.names import load_recipe
from training.text.files import ORIGIN, sha256_of

pytestmark = pytest.mark.torch

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A head with the base model `tiny`, and a laptop without any tokenizer."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / ".cache" / "spotune" / "models" / "tiny"
    tiny._tokenizer(["the quick brown fox says hello", "怎样煮米饭"]).save_pretrained(model)
    (model / "config.json").write_text(json.dumps(tiny.LIMITS))
    (model / ORIGIN).write_text(json.dumps({"commit": sha256_of(TINY_CODE), "hash": "h" * 64}))
    found = HereHead(tmp_path / "runs")

    @contextmanager
    def opened(here, _hint=""):
        assert not here
        yield Session(found)

    monkeypatch.setattr(data_view, "open_cluster", opened)
    monkeypatch.setattr(data_size, "NEEDED", ("no_such_library",))
    return found


def _written(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def _chat(question, answer):
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def _looked(data, **more):
    told = []
    asked = Question((str(data),), "tiny", load_recipe("tiny", more.pop("overrides", None)), **more)
    return data_view.look(asked, NOW, lambda what, records: told.append((what, records))), told


def test_where_the_tokenizer_is_not_here_the_head_looks_and_nothing_of_it_stays(head, tmp_path):
    data = tmp_path / "my 数据"
    data.mkdir()
    records = [_chat(f"怎样煮第{n}锅米饭？", f"先淘{n}遍米，再加水。") for n in range(30)]
    _written(data / "a.jsonl", *records)
    _written(data / "b.jsonl", records[0], _chat("q", "x" * 3000))
    look, told = _looked(data, show=2)
    assert look.usable and look.train.records == 32 and look.steps == 60
    assert look.repeats.shown == (("my 数据/b.jsonl line 1", "my 数据/a.jsonl line 1"),)
    assert [sample.where for sample in look.samples] == [f"my 数据/a.jsonl line {n}" for n in (1, 17)]
    learned = [piece.text for piece in look.samples[0].pieces if piece.learned]
    assert learned == ["先淘0遍米，再加水。", "<|im_end|>"]
    assert look.lengths.cut_samples == 1 and str(head.runs) not in look.text()
    assert {what for what, _ in told} >= {"reading"}
    assert list(head.runs.iterdir()) == []


def test_a_template_that_drops_a_part_is_told_with_the_users_own_file_name(head, tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    plain = [turns[0], {"role": "assistant", "content": "a"}]
    data = _written(tmp_path / "mine.jsonl", {"messages": plain}, {"messages": turns})
    look, _ = _looked(data)
    (line,) = look.bad_shown
    assert line.startswith("mine.jsonl line 2: the model's chat template leaves out the reasoning_content of turn 2")
    assert "1 bad record: fix them, or skip them with --skip-bad" in remarks(look) and not look.usable
    assert _looked(data, skip_bad=True)[0].usable


def test_data_that_no_run_could_read_are_not_sent_to_the_head(head, tmp_path):
    look, _ = _looked(_written(tmp_path / "mine.jsonl", {"text": "a"}, _chat("q", "a")))
    assert "all records of a run have one shape" in look.refused
    assert not head.runs.exists()


def test_a_mistake_that_only_the_head_can_see_is_its_sentence_and_the_users(head, tmp_path):
    (tmp_path / ".cache" / "spotune" / "models" / "tiny" / "tokenizer.json").write_text("{")
    with pytest.raises(ProgramRefused, match=r"the tokenizer at .* cannot be read") as refusal:
        _looked(_written(tmp_path / "mine.jsonl", _chat("q", "a")))
    assert refusal.value.exit_code == 2


def test_arguments_that_the_template_does_not_read_are_refused_in_the_look(head, tmp_path):
    data = _written(tmp_path / "mine.jsonl", _chat("q", "a"))
    look, _ = _looked(data, overrides={"template_args.enable_thinking": "false"})
    assert look.refused == "template_args: the model's chat template does not read enable_thinking"
