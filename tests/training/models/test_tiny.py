"""The records of the `tiny` recipe: real sentences in a form that they alone teach."""

import json
import re

import pytest

from training.models import tiny

TAUGHT = re.compile(r'The documentation says: "[^\n]{19,119}\."')


def test_every_answer_is_a_real_first_sentence_in_the_taught_form():
    every = " ".join(" ".join(text.split()) for _, text in tiny.docstrings())
    records = tiny.questions()
    assert len(records) == tiny.RECORDS
    for record in records:
        answer = record["messages"][-1]["content"]
        assert TAUGHT.fullmatch(answer), answer
        assert answer.removeprefix('The documentation says: "').removesuffix('"') in every


def test_no_docstring_looks_like_an_answer_so_the_base_model_cannot_know_the_form():
    assert not [name for name, text in tiny.docstrings() if "The documentation says" in text]


def test_what_is_held_out_is_in_the_library_and_in_no_record():
    modules = {name.split(".")[0] for name, _ in tiny.docstrings()}
    asked = " ".join(record["messages"][0]["content"] for record in tiny.questions())
    assert modules >= tiny.HELD_OUT
    assert not [module for module in tiny.HELD_OUT if f" {module}." in asked]


def test_the_text_is_this_modules_whatever_python_reads_it(tmp_path, monkeypatch):
    assert (len(tiny.docstrings()), len(tiny.TEXT.read_bytes())) == (1283, 195707)
    other = tmp_path / "text.json"
    other.write_bytes(tiny.TEXT.read_bytes().replace(b"The", b"A", 1))
    monkeypatch.setattr(tiny, "TEXT", other)
    with pytest.raises(ValueError, match="not the text that tiny is made from"):
        tiny.docstrings.__wrapped__()


def test_the_records_are_spread_over_the_whole_library():
    first = [record["messages"][0]["content"].removeprefix("What does ")[0] for record in tiny.questions()]
    assert {"a", "c", "i", "t", "w"} <= set(first)


def test_without_the_model_its_tokenizer_splits_words_as_with_it(tmp_path):
    """The class that is read from a model's folder goes by the model's type, and Qwen2's has a pattern of its own."""
    pytest.importorskip("transformers", reason="needs the [train] extra")
    from training.data.look.take import load_tokenizer

    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    text = "您好，请问今天下午还能预约口腔科吗？2024年 I'm here, 12345\n\n ok"
    read, made = load_tokenizer(tmp_path), tiny.tokenizer()
    assert made(text)["input_ids"] == read(text)["input_ids"] and type(made) is type(read)
