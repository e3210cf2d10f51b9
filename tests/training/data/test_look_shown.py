"""A look on a terminal, and in a pipe: what comes from a file is text, wherever it is shown."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from inventory.setting_types import SettingsError
from inventory.terminal import console
from training.data.look.content import FEWEST, Look, look_from, remarks
from training.data.look.shown import Piece, ShownSample
from training.data.report import DataReport
from training.data.sample import DataError
from training.data.statistics import Repeats, lengths_of
from training.data.survey import FileSurvey, Survey
from training.laptop import data_size, data_view
from training.laptop.data_view import Question
from training.models.names import load_recipe

EVIL = "[red]</b><script>alert(1)</script>\x1b[2J\u202e"
SAMPLE = ShownSample(
    where="a.jsonl line 1",
    of=(1, 2),
    held_out=False,
    tokens=9,
    learned=4,
    cut=3,
    pieces=(
        Piece("<|im_start|>", False, True, 1),
        Piece(f"user\n{EVIL}", False, False, 4),
        Piece("答案", True, False, 3),
        Piece("<|im_end|>", True, True, 1),
    ),
)
FILES = (FileSurvey("a.jsonl", 1234, {"sharegpt": 7}, 12), FileSurvey(f"b{EVIL}.csv", 2_345_678, {}, 0, "no"))
REPORT = {
    **dict.fromkeys(DataReport.__annotations__, 0),
    **dict.fromkeys(("content_hash", "shape"), ""),
    **{"records": 7, "samples": 8, "tokens": 130, "learned_tokens": 40, "rows": 3, "efficiency": 0.677, "empty": 1},
    "batching": "packed",
    "settings": {"train_on": "assistant", "template_args": {"enable_thinking": False}},
    "marks": (),
}
TRAIN = DataReport(**{**REPORT, "template": True, "end_of_turn_learned": True, "end_of_turn": "<|im_end|>"})
LOOKED = Look(
    survey=Survey(FILES, 12, ()),
    bad=12,
    bad_shown=(f"a.jsonl line 3: {EVIL}",),
    bad_more=11,
    skipped=False,
    model="tiny",
    global_batch=4,
    steps=10,
    lengths=lengths_of([10, 20, 64, 100], 64),
    train=TRAIN,
    validation=replace(TRAIN, records=2, samples=2, tokens=20, empty=0),
    repeats=Repeats(3, (("a.jsonl line 5", "a.jsonl line 2"),), 2, 1, 1, (("a.jsonl line 6", "a.jsonl line 2"),)),
    samples=(SAMPLE,),
)
ENOUGH = replace(LOOKED, train=replace(LOOKED.train, samples=FEWEST))


def _printed(look, **options):
    stream = io.StringIO()
    data_view.show(look, console(file=stream, width=200, **options))
    return stream.getvalue()


def test_in_a_pipe_there_is_no_colour_and_what_is_learned_stands_in_brackets():
    said = _printed(LOOKED)
    assert "\x1b" not in said and "\u202e" not in said
    assert "⟦答案<|im_end|>⟧" in said and "between ⟦ and ⟧: what is learned" in said
    assert "user\n[red]</b><script>alert(1)</script>\\x1b[2J\\u202e⟦" in said


def test_on_a_terminal_what_is_learned_is_green_and_the_rest_dim():
    said = _printed(LOOKED, force_terminal=True, color_system="standard")
    assert "\x1b[32m答案\x1b[0m" in said and "\x1b[4;32m<|im_end|>\x1b[0m" in said
    assert "\x1b[2muser" in said and "⟦" not in said and "in green: what is learned" in said
    assert "\x1b[2J" not in said and "\\x1b[2J" in said


def test_of_a_pair_it_is_said_which_answer_is_shown():
    pair = tuple(replace(SAMPLE, of=(number, 2), side=side) for number, side in enumerate(("chosen", "rejected"), 1))
    said = _printed(replace(LOOKED, samples=pair))
    assert "a.jsonl line 1, chosen: 4 of 9" in said and "a.jsonl line 1, rejected: 4 of 9" in said
    assert "look different" not in said


def test_a_terminal_without_colours_gets_the_brackets(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    said = re.sub("\x1b\\[[0-9;]*m", "", _printed(LOOKED, force_terminal=True))
    assert "⟦答案<|im_end|>⟧" in said


def test_steps_that_teach_nothing_are_said():
    train = replace(LOOKED.train, rows=8)
    said = _printed(replace(LOOKED, steps=1, global_batch=16, train=train))
    assert "1 step in all teaches next to nothing; more epochs or steps, or a smaller global_batch, make them" in said
    said = _printed(replace(LOOKED, steps=9, global_batch=4, train=train))
    assert "9 steps in all teach next to nothing; " in said
    assert "next to nothing" not in _printed(replace(LOOKED, steps=10))


def test_all_numbers_are_told():
    said = _printed(LOOKED)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "a.jsonl 1.2 kB 7 sharegpt 12" in lines
    assert "tiny: 8 samples of 130 tokens, 40 of them learned (31%; train_on = assistant)" in lines
    assert "packed: 3 rows, 67.7% full" in lines
    assert "10 steps of 4 rows: each row is seen 13.3 times" in lines
    assert "held out: 2 records, 20 tokens" in lines and "template_args: enable_thinking = False" in lines
    assert f"9 to 16 1 {'#' * 40}" in lines and f"65 to 128 1 {'#' * 40} 36" in lines
    assert "half have at most 20, 95 % at most 100, the longest 100" in lines
    assert "and 11 more records" in lines and "a.jsonl line 5 is the same as a.jsonl line 2" in lines
    assert "a.jsonl line 6 (held out) asks what a.jsonl line 2 asks" in lines
    assert lines[-6:] == [
        "12 bad records: fix them, or skip them with --skip-bad",
        "8 to learn from; with fewer than 30 only --anyway starts",
        "1 of 4 samples is cut at max_length 64, 36 tokens in all; --set max_length=100 would cut none",
        "1 record left out: nothing to learn within max_length",
        "3 records the same as one before",
        "of 2 held-out records 1 in the training data too, and the questions of 1 more: a loss on what was learned "
        "says nothing",
    ]


def test_of_many_files_those_with_something_to_mend_are_shown_and_the_others_counted():
    files = tuple(FileSurvey(f"{n}.jsonl", 9, {"text": 1}, n == 28, "no" * (n == 29)) for n in range(30))
    said = _printed(Look(Survey(files, 1, ()), 1, (), False))
    assert [line.split(" ")[0] for line in said.splitlines()[1:4]] == ["28.jsonl", "29.jsonl", "0.jsonl"]
    assert "18.jsonl" not in said and "and 10 more files, 30 records in all" in said


def test_elsewhere_than_on_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(data_view, "PLAIN_EVERY_S", 0)
    with data_view.progress() as tell:
        tell("tokenising", 0)
        tell("tokenising", 2000)
    assert capsys.readouterr().err == "tokenising\ntokenising: 2000 records\n"


def test_a_long_piece_is_shown_without_its_middle():
    long = replace(SAMPLE, pieces=(Piece("a" * 1000 + "b" * 1000, True, False, 9),), left_out=7)
    said = _printed(replace(LOOKED, samples=(long,)))
    assert f"⟦{'a' * 300} ... 1400 characters ... {'b' * 300}⟧ (7 more tokens)" in said


def test_a_look_is_read_back_from_its_text_as_it_was():
    assert look_from(json.loads(LOOKED.text())) == LOOKED


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (LOOKED, "next: fix what is reported above, then look again"),
        (
            replace(ENOUGH, skipped=True),
            "next: fab train --model tiny --data 'my data.jsonl' --skip-bad --dry; with --here on this machine alone",
        ),
        (
            replace(ENOUGH, bad=0),
            "next: fab train --model tiny --data 'my data.jsonl' --dry; with --here on this machine alone",
        ),
        (
            replace(LOOKED, bad=0),
            "next: fab train --model tiny --data 'my data.jsonl' --anyway --dry; with --here on this machine alone",
        ),
        (replace(LOOKED, bad=0, refused="no"), "next: fix what is reported above, then look again"),
    ],
)
def test_the_next_step_is_named(look, said):
    assert data_view.next_step(Question(("my data.jsonl",), "tiny", load_recipe("tiny")), look) == said


def test_the_next_step_keeps_what_was_set():
    settings = ("max_length=64", "licence=a b")
    asked = Question(("a.csv",), "./my model", load_recipe("tiny"), here=True, settings=settings)
    said = data_view.next_step(asked, replace(ENOUGH, bad=0))
    assert said == (
        "next: fab train --model './my model' --data a.csv --set max_length=64 --set 'licence=a b' --here --dry"
    )


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (None, "; --set max_length=100 would cut none"),
        (1000, "; --set max_length=100 would cut none"),
        (80, "; --set max_length=80 is the most that the model takes"),
        (64, ", which is the most that the model takes"),
    ],
)
def test_no_max_length_is_proposed_that_the_model_does_not_take(positions, said):
    assert any(line.endswith(f"36 tokens in all{said}") for line in remarks(replace(LOOKED, positions=positions)))


@pytest.mark.parametrize(
    ("samples", "shape", "few"),
    [(29, "sharegpt", 29), (30, "sharegpt", None), (58, "preference", 29), (60, "preference", None)],
)
def test_fewer_than_a_run_starts_with_are_remarked_with_the_way_to_start_all_the_same(samples, shape, few):
    files = (FileSurvey("a.jsonl", 1234, {shape: samples}, 0),)
    look = replace(ENOUGH, survey=Survey(files, 0, ()), train=replace(ENOUGH.train, samples=samples))
    said = [line for line in remarks(look) if "--anyway" in line]
    assert said == ([f"{few} to learn from; with fewer than 30 only --anyway starts"] if few else [])


@pytest.mark.parametrize(
    ("leaked", "said"),
    [
        (0, "of 9 held-out records none in the training data too; the same question with another answer: 1"),
        (
            2,
            "of 9 held-out records 2 in the training data too, and the questions of 1 more: a loss on what was learned "
            "says nothing",
        ),
    ],
)
def test_nothing_is_called_leaked_where_only_questions_are_the_same(leaked, said):
    look = Look(Survey((), 0, ()), 0, (), False, repeats=Repeats(0, (), 9, leaked, 1, ()))
    assert list(remarks(look)) == [said]


def test_records_that_teach_no_end_are_remarked():
    train = replace(TRAIN, end_of_turn_learned=False)
    assert any("would not learn to stop" in line for line in remarks(replace(LOOKED, train=train)))


def _asked(data, **more):
    return data_view.look(
        Question((str(data),) if data else (), "", more.pop("recipe", None), **more), datetime.now(UTC), lambda *_: None
    )


def test_where_most_samples_are_cut_a_run_would_not_start():
    look = replace(LOOKED, bad=0, lengths=lengths_of([10, 100, 100], 64))
    assert not look.usable and any("does not start" in line for line in remarks(look))
    assert replace(look, lengths=lengths_of([10, 10, 100], 64)).usable


def test_without_a_head_and_a_tokenizer_the_files_are_looked_at_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(data_size, "NEEDED", ("no_such_library",))

    def opened(*_):
        raise SettingsError("there is no cluster")

    monkeypatch.setattr(data_view, "open_cluster", opened)
    (file := tmp_path / "a.jsonl").write_text('{"text": "one"}\n{}\n')
    asked = Question((str(file),), "qwen3-8b", load_recipe("qwen3-8b"))
    look = data_view.look(asked, datetime.now(UTC), lambda *_: None)
    assert look.survey.records == 1 and look.bad == 1 and not look.usable
    assert "no_such_library: pip install -e '.[data]'" in look.refused and "there is no cluster" in look.refused


def test_without_a_model_the_files_are_looked_at(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "once"}\n{"tex')
    look = _asked(tmp_path / "a.jsonl")
    assert (look.survey.records, look.bad, look.train) == (1, 1, None)
    said = data_view.next_step(Question(("a",), "", None), replace(look, bad=0))
    assert said == "next: what is learned, and lengths in tokens: fab data --model NAME --data a"


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ("", {}, "say which data: --data FILE: JSONL, JSON, CSV, TSV or Parquet, a folder of them, or OWNER/NAME"),
        ("nowhere.jsonl", {}, "nowhere.jsonl: no such file or folder"),
        ("owner/name", {}, "--data owner/name is looked at on the head: say --model NAME"),
        ("a", {"show": -1}, "--show -1: a number of samples, from 0"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(data, more, said):
    with pytest.raises(DataError) as refusal:
        _asked(data, **more)
    assert str(refusal.value) == said


def test_here_says_what_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "nowhere.toml"))
    monkeypatch.setattr(data_size, "NEEDED", ("json",))
    (tmp_path / "a.jsonl").write_text('{"text": "once"}\n')
    look = _asked(tmp_path / "a.jsonl", recipe=load_recipe("qwen3-8b"), here=True)
    (tmp_path / "cluster.toml").write_text('[mirrors]\npreset = "china"\n')
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    mirrored = _asked(tmp_path / "a.jsonl", recipe=load_recipe("qwen3-8b"), here=True).refused
    assert "; HF_ENDPOINT=https://hf-mirror.com hf download Qwen/Qwen3-8B" in mirrored
    assert "tokenizer.model fetches it; without --here" in mirrored
    assert look.refused == (
        "--here: the tokenizer of Qwen/Qwen3-8B is not on this machine; hf download Qwen/Qwen3-8B --revision main "
        "--include '*.json' --include '*.jinja' --include tokenizer.model fetches it from the mirror that HF_ENDPOINT "
        "names, or the Hub; without --here the head is asked"
    )
    assert look.survey.records == 1, "what can be seen without it is shown"
    monkeypatch.setattr(data_size, "NEEDED", ("no_such_library",))
    look = _asked(tmp_path / "a.jsonl", recipe=load_recipe("tiny"), here=True)
    assert "this Python lacks no_such_library: pip install -e '.[data]'; without" in look.refused
