"""Records: what is refused and where, the order of samples, and what of a conversation is learned."""

from __future__ import annotations

import hashlib
import json
from array import array

import pytest

from training.data import IGNORED, DataError, Order, Sample, check_file, encode, micro_batches, micro_steps, tokenize

PAIR = {"prompt": "two plus two?", "completion": "four"}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def _file(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def test_both_shapes_are_counted_and_hashed(tmp_path):
    path = _file(tmp_path, CHAT, b"", CHAT)
    summary = check_file(path)
    assert (summary.records, summary.shape) == (2, "messages")
    assert summary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert check_file(_file(tmp_path, PAIR)).shape == "prompt/completion"


def _turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        ([1], "an object is expected, found list"),
        ({"text": "x"}, "neither messages nor prompt and completion; keys: text"),
        ({"messages": []}, "at least one turn"),
        ({"messages": [_turn("user", "x")]}, "no assistant turn"),
        ({"messages": [_turn("assistant", "x")]}, "before any user turn"),
        ({"messages": [_turn("user", "x"), _turn("bot", "y")]}, "role 'bot'"),
        ({"messages": [_turn("user", "x"), _turn("system", "y")]}, "only the first may be"),
        ({"messages": [_turn("user", "x"), {"role": "assistant"}]}, "turn 2 needs"),
        ({"prompt": "x", "completion": " "}, "every assistant turn is empty"),
        ({"prompt": "x", "completion": 4}, "turn 2 needs"),
        (PAIR, "prompt/completion, but the lines before are messages"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, bad, reason):
    path = _file(tmp_path, CHAT, CHAT, bad)
    with pytest.raises(DataError) as caught:
        check_file(path)
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert reason in str(caught.value)


def test_an_empty_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"\.jsonl: the file is empty"):
        check_file(_file(tmp_path, b" "))
    with pytest.raises(DataError, match="nowhere"):
        check_file(tmp_path / "nowhere")


def test_every_epoch_sees_every_sample_once_in_another_order():
    order = Order(samples=10, seed=3, global_batch=5)
    first, second = order.step(0) + order.step(1), order.step(2) + order.step(3)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert Order(10, 4, 5).step(0) != first[:5]


def test_a_step_crosses_the_end_of_an_epoch_and_needs_no_history():
    order = Order(samples=7, seed=0, global_batch=5)
    batches = [order.step(step) for step in range(7)]
    assert all(len(batch) == 5 for batch in batches)
    flat = [number for batch in batches for number in batch]
    assert [sorted(flat[i : i + 7]) for i in range(0, 35, 7)] == [list(range(7))] * 5
    assert Order(7, 0, 5).step(6) == batches[6]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_ranks_share_a_batch_out_whole_in_equally_many_micro_batches(world_size, micro_batch):
    batch = list(range(100, 110))
    parts = [micro_batches(batch, rank, world_size, micro_batch) for rank in range(world_size)]
    assert {len(part) for part in parts} == {micro_steps(10, world_size, micro_batch)}
    assert sorted(n for part in parts for micro in part for n in micro) == batch
    assert all(len(micro) <= micro_batch for part in parts for micro in part)


def test_fewer_samples_than_ranks_leave_ranks_with_an_empty_micro_batch():
    assert [micro_batches([5, 6], rank, 3, 2) for rank in range(3)] == [[[5]], [[6]], [[]]]


MARKS = {"<": 1, ">": 2, "|": 3}


class Characters:
    """A chat tokenizer of one token a character, with ids easy to read back."""

    all_special_ids = (1, 2, 3)
    chat_template = "yes"

    def __init__(self, forgets=False, thinks=False):
        self.forgets, self.thinks = forgets, thinks

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, return_dict):
        assert tokenize and not return_dict
        text = ""
        for place, turn in enumerate(messages):
            dropped = self.forgets and turn["role"] == "assistant" and place < len(messages) - 1
            text += f"<{turn['role'][0]}:" + ("" if dropped else turn["content"]) + ">\n"
        if add_generation_prompt:
            text += "<a:" + ("hm" if self.thinks else "")
        return [MARKS.get(char) or ord(char) for char in text]


def _learned(sample):
    return "".join(chr(label) if label > 3 else ".<>|"[label] for label in sample.labels if label != IGNORED)


TURNS = [_turn("user", "q"), _turn("assistant", "one"), _turn("user", "r"), _turn("assistant", "two")]


def test_only_what_the_assistant_says_and_its_end_of_turn_are_learned():
    sample = encode(TURNS, Characters(), 100)
    assert _learned(sample) == "one>two>"
    assert sample.learned == 8
    assert len(sample.ids) == len(sample.labels)


def test_the_first_token_is_never_learned_for_nothing_comes_before_it():
    assert Sample(array("l", [7, 8, 9]), array("l", [7, IGNORED, 9])).learned == 1


def test_a_generation_prompt_that_says_more_than_the_turn_is_not_taken_off_it():
    assert _learned(encode(TURNS[:2], Characters(thinks=True), 100)) == "one>"


def test_truncation_cuts_the_end_and_leaves_out_what_has_nothing_to_learn(tmp_path):
    path = _file(tmp_path, CHAT, {"prompt": "a very long question" * 3, "completion": "x"})
    samples, left_out = tokenize(path, Characters(), 12)
    assert (len(samples), left_out) == (1, 1)
    assert len(samples[0].ids) == 12
    with pytest.raises(DataError, match="anything to learn within 4 tokens"):
        tokenize(path, Characters(), 4)


def test_a_template_that_renders_earlier_turns_differently_is_refused_with_the_line(tmp_path):
    path = _file(tmp_path, CHAT, {"messages": TURNS})
    with pytest.raises(DataError, match=r"line 2: turn 2 cannot be told apart"):
        tokenize(path, Characters(forgets=True), 100)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = Characters()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        tokenize(_file(tmp_path, CHAT), tokenizer, 100)
