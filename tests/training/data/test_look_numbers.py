"""Lengths against max_length, repeats and leaks: exact numbers, from values alone."""

from __future__ import annotations

import random

import pytest

from training.data.encoded import digests
from training.data.shapes import recognised
from training.data.statistics import Seen, lengths_of


def test_the_histogram_counts_every_sample_once_and_what_would_be_cut():
    found = lengths_of([1, 8, 9, 63, 64, 65, 128, 129, 1000], 64)
    assert [(one.above, one.most, one.samples, one.cut) for one in found.bins] == [
        (0, 8, 2, 0),
        (8, 16, 1, 0),
        (16, 24, 0, 0),
        (24, 32, 0, 0),
        (32, 40, 0, 0),
        (40, 48, 0, 0),
        (48, 56, 0, 0),
        (56, 64, 2, 0),
        (64, 128, 2, 65),
        (128, 256, 1, 65),
        (256, 512, 0, 0),
        (512, 1000, 1, 936),
    ]
    assert (found.samples, found.cut_samples, found.cut_tokens) == (9, 4, 1 + 64 + 65 + 936)
    assert (found.median, found.p95, found.longest) == (64, 1000, 1000)


@pytest.mark.parametrize("seed", range(20))
def test_the_bins_of_any_lengths_add_up(seed):
    draw = random.Random(seed)
    most = draw.choice([8, 9, 100, 4096])
    lengths = [draw.randint(1, draw.choice([5, most, 3 * most, 40 * most])) for _ in range(draw.randint(1, 200))]
    found = lengths_of(lengths, most)
    assert sum(one.samples for one in found.bins) == len(lengths)
    assert sum(one.cut for one in found.bins) == found.cut_tokens == sum(max(0, length - most) for length in lengths)
    for one in found.bins:
        assert one.samples == sum(one.above < length <= one.most for length in lengths)
    for share, said in ((0.5, found.median), (0.95, found.p95)):
        assert sum(length <= said for length in lengths) >= share * len(lengths) > sum(n < said for n in lengths)


def test_nothing_is_beyond_max_length_where_nothing_is_cut():
    found = lengths_of([10, 64], 64)
    assert found.bins[-1].most == 64 and len(found.bins) == 8 and found.cut_samples == found.cut_tokens == 0


def _chat(question, answer, **more):
    return recognised(
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}
    )


def test_white_space_apart_equal_records_are_duplicates_and_equal_questions_are_told_from_them():
    seen = Seen()
    records = [_chat("q", "a"), _chat(" q\n", "a "), _chat("q", "b"), _chat("Q", "a"), _chat("q", "a")]
    for number, record in enumerate(records, 1):
        seen.add(f"f line {number}", digests(record), held_out=False)
    found = seen.repeats()
    assert found.duplicates == 2
    assert found.shown == (("f line 2", "f line 1"), ("f line 5", "f line 1"))
    assert (found.held_out, found.leaked, found.leaks_shown) == (0, 0, ())


def test_a_leak_is_a_held_out_record_that_is_trained_on_wherever_it_stands():
    seen = Seen()
    held_out = {"f 1", "f 4", "f 5", "f 6"}
    records = [_chat("q1", "a"), _chat("q1", "a"), _chat("q2", "a"), _chat("q2", "other"), _chat("q3", "a")]
    for number, record in enumerate([*records, _chat("q3", "a")], 1):
        seen.add(f"f {number}", digests(record), f"f {number}" in held_out)
    found = seen.repeats()
    assert (found.held_out, found.leaked, found.leaked_question) == (4, 1, 1)
    assert found.leaks_shown == (("f 1", "f 2"), ("f 4", "f 3"))


@pytest.mark.parametrize(
    "other",
    [
        _chat("q", "a", tools=[{"name": "look"}]),
        _chat("q", "a", template_args={"enable_thinking": False}),
        recognised({"messages": [{"role": "system", "content": "q"}, *_chat("q", "a").turns]}),
        recognised({"messages": [*_chat("q", "a").turns, *_chat("q", "a").turns]}),
    ],
)
def test_what_differs_in_tools_arguments_or_turns_is_no_duplicate(other):
    assert digests(other)[0] != digests(_chat("q", "a"))[0]


def test_a_text_asks_nothing_and_a_thought_is_part_of_an_answer():
    whole, question = digests(recognised({"text": "once upon"}))
    assert whole == question == digests(recognised({"text": "once  upon"}))[0]
    one = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    thoughtful = recognised({"messages": [{"role": "user", "content": "q"}, one]})
    assert digests(thoughtful)[0] != digests(_chat("q", "a"))[0]
    assert digests(thoughtful)[1] == digests(_chat("q", "a"))[1]
