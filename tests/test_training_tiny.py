"""The records of the `tiny` recipe: real sentences in a form that they alone teach."""

import re

from training import tiny

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


def test_the_records_are_spread_over_the_whole_library():
    first = [record["messages"][0]["content"].removeprefix("What does ")[0] for record in tiny.questions()]
    assert {"a", "c", "i", "t", "w"} <= set(first)
