"""Preferences: the forms TRL documents, what is wrong with a record, and pairs that share a row."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers", reason="needs the [train] extra")

from training.data.build import Build, content_hash  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.encode import Encoder, fault, shared_prefix  # noqa: E402
from training.data.prepared import open_prepared  # noqa: E402
from training.data.readers import check  # noqa: E402
from training.data.sample import IGNORED, Bad, BadRecord, DataError, Sample  # noqa: E402
from training.data.shapes import recognised, refuse_other_goal  # noqa: E402
from training.data.source import data_of  # noqa: E402
from training.data.statistics import DataStatistics  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402

pytestmark = pytest.mark.torch

ASKED = {"role": "user", "content": "What is it?"}


def _said(words):
    return {"role": "assistant", "content": words}


PAIR = {"prompt": [ASKED], "chosen": [_said("It is good.")], "rejected": [_said("No idea whatsoever.")]}
WHOLE = {"chosen": [ASKED, _said("It is good.")], "rejected": [ASKED, _said("No idea whatsoever.")]}
PLAIN = {"prompt": "What is it?", "chosen": "It is good.", "rejected": "No idea whatsoever."}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny._tokenizer(["what is it? it is good. no idea whatsoever."])


GOOD, POOR = "It is good.", "No idea whatsoever."
OBJECTS = {"chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": POOR}}


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        WHOLE,
        {"prompt": "What is it?", **WHOLE},
        {"messages": WHOLE["chosen"], "prompt": "What is it?", **WHOLE},
        PLAIN,
        {"instruction": "What is it?", "input": "", "chosen": GOOD, "rejected": POOR},
        {"instruction": "What is it?", "chosen": _said(GOOD), "rejected": _said(POOR)},
        {"conversations": [{"from": "human", "value": "What is it?"}], **OBJECTS},
        {"conversations": [{"from": "human", "value": "What is it?"}], "chosen": GOOD, "rejected": POOR},
        {"messages": [ASKED], "chosen": [_said(GOOD)], "rejected": [_said(POOR)]},
        {"prompt": "What is it?", "chosen": [_said(GOOD)], "rejected": [_said(POOR)]},
        {"messages": WHOLE["chosen"], "rejected_response": POOR},
        {key: json.dumps(value) for key, value in PAIR.items()},
    ],
)
def test_each_form_is_the_same_two_conversations(record):
    found = recognised(record)
    assert found.shape == "preference" and found.rejected is not None
    assert found.turns == (ASKED, _said("It is good."))
    assert found.rejected.turns == (ASKED, _said("No idea whatsoever."))


@pytest.mark.parametrize(
    "more", [{"tool_calls": [{"name": "look"}]}, {"reasoning_content": "Hm."}, {"weight": 0}, {"role": "tool_call"}]
)
def test_a_turn_beside_an_instruction_that_is_more_than_its_words_is_refused(more):
    sides = {"chosen": _said('{"name": "look"}'), "rejected": _said(POOR)}
    assert recognised({"instruction": "What is it?", **sides, "chosen": sides["chosen"] | {"weight": 1}})
    with pytest.raises(BadRecord):
        recognised({"instruction": "What is it?", **sides, "chosen": sides["chosen"] | more})


def test_calls_in_turns_of_their_own_are_answers_to_a_prompt():
    calls = {side: [{"from": "function_call", "value": json.dumps({"name": side})}] for side in ("chosen", "rejected")}
    found = recognised({"prompt": "What is it?", **calls})
    sides = [side.turns[1]["tool_calls"][0]["function"]["name"] for side in (found, found.rejected)]
    assert sides == ["chosen", "rejected"]


def test_an_answer_in_the_prompt_is_context_and_tools_are_both_sides():
    tools = [{"type": "function", "function": {"name": "look"}}]
    before = [ASKED, _said("Well."), {"role": "user", "content": "Say!"}]
    found = recognised({**PAIR, "prompt": before, "tools": tools})
    assert found.not_learned == found.rejected.not_learned == {1}
    assert found.tools == found.rejected.tools == tuple(tools)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rejected": None}, "chosen without rejected; a preference needs both"),
        ({"chosen": None}, "rejected without chosen"),
        ({"rejected": PAIR["chosen"]}, "chosen and rejected are the same, so there is nothing to prefer"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "lack a question"),
        ({"prompt": "x", "chosen": "a", "rejected": " "}, "rejected: rejected is empty"),
        ({"chosen": "It is."}, "chosen: prompt and chosen must both be text or both be lists of turns"),
        ({"chosen": [{"role": "bot", "content": "x"}]}, "chosen: turn 1 has the role 'bot'"),
        (
            {"prompt": None, "chosen": [ASKED, _said("a"), ASKED], "rejected": [ASKED, _said("a")]},
            "is the beginning of",
        ),
        ({"prompt": None}, "lack a question"),
        (
            {
                "prompt": None,
                "chosen": [{"role": "user", "content": "Else?"}, _said("a")],
                "rejected": [ASKED, _said("b")],
            },
            "begin with different turns",
        ),
        ({"rejected": [_said("")]}, "rejected: every assistant turn is empty"),
    ],
)
def test_what_is_wrong_with_a_preference_is_one_sentence(changes, reason):
    with pytest.raises(BadRecord) as error:
        recognised(PAIR | changes)
    assert reason in str(error.value)


def test_a_goal_is_held_against_the_shape_of_the_data(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR))
    assert check(data_of(path)).shape == "preference"
    with pytest.raises(DataError, match="which goal sft does not learn from; --set goal=dpo"):
        refuse_other_goal("preference", "sft")
    with pytest.raises(DataError, match=r"goal dpo learns from preferences.*these are messages"):
        refuse_other_goal("messages", "dpo")
    refuse_other_goal("preference", "dpo")
    refuse_other_goal("text", "sft")


def test_what_both_answers_are_told_alike_stands_in_a_row_once():
    chosen = Sample([1, 2, 3, 4, 5, 6], [IGNORED, IGNORED, IGNORED, 4, 5, 6])
    rejected = Sample([1, 2, 3, 4, 7], [IGNORED, IGNORED, IGNORED, 4, 7])
    batch = collate([[chosen, rejected]], 0, "packed", pairs=True)
    assert batch.layout == ((2, 6, 5),), "the last token of the prompt predicts, and is computed for each"
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 3, 4, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4]]
    assert batch.targets.tolist() == [[-100, -100, 4, 5, 6, -100, 4, 7, -100]]
    assert batch.answers == (3, 2)
    other = Sample([9, 2, 3, 4, 7], [IGNORED, IGNORED, IGNORED, 4, 7])
    assert shared_prefix(chosen, other) == 0 and shared_prefix(chosen, Sample([1, 7], [IGNORED, 7])) == 0
    assert collate([[chosen, rejected]], 0, "padded", pairs=True).input_ids.shape == (2, 6)


def _built(folder, tokenizer, records, skip=False, **settings):
    source, recipe = folder / "train.jsonl", load_recipe("tiny", {"goal": "dpo", "max_length": "64", **settings})
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    bad = Bad(skip)
    encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on)
    watch = DataStatistics(len(records), 0, lambda *_: None)
    Build(encoder, recipe, folder / "made", bad, watch).run(data_of(source), content_hash("", tokenizer, recipe))
    return open_prepared(folder / "made" / "train"), bad


def _many(count):
    return [
        {"prompt": [ASKED], "chosen": [_said("good " * (n % 5 + 1))], "rejected": [_said("idea " * (n % 3 + 1))]}
        for n in range(count)
    ]


def test_both_answers_of_a_pair_share_a_row_the_chosen_one_first(tmp_path, tokenizer):
    prepared, _ = _built(tmp_path, tokenizer, _many(30), max_length="256")
    assert (prepared.report.records, prepared.report.pairs, prepared.report.samples) == (30, 30, 60)
    assert prepared.report.max_length == 2 * 256, "a row holds two answers of max_length"
    assert prepared.rows < 30 and prepared.counted.sum() == 30
    told = []
    for number in range(prepared.rows):
        samples = prepared.row(number)
        assert len(samples) == 2 * prepared.counted[number]
        held = collate([samples], 0, "packed", pairs=True).input_ids.numel()
        assert prepared.tokens[number] == held <= 512 and held < sum(len(sample.ids) for sample in samples)
        for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
            said = [tokenizer.decode([i for i in each.labels if i != IGNORED]) for each in (chosen, rejected)]
            told.append(tuple(said))
    wanted = [(r["chosen"][0]["content"] + "<|im_end|>", r["rejected"][0]["content"] + "<|im_end|>") for r in _many(30)]
    assert sorted(told) == sorted(wanted)


@pytest.mark.parametrize("batching", ["padding-free", "padded"])
def test_without_packing_each_row_is_a_pair(tmp_path, tokenizer, batching):
    prepared, _ = _built(tmp_path, tokenizer, _many(7), batching=batching)
    assert prepared.rows == 7 and prepared.counted.tolist() == [1] * 7


def test_a_pair_of_which_max_length_leaves_no_preference_is_a_bad_record(tmp_path, tokenizer):
    long_prompt = {**PAIR, "prompt": [{"role": "user", "content": "what " * 90}]}
    alike = {**PAIR, "chosen": [_said("good " * 90)], "rejected": [_said("good " * 91)]}
    with pytest.raises(DataError) as error:
        _built(tmp_path, tokenizer, [PAIR, long_prompt, alike])
    said = str(error.value)
    assert "line 2: the prompt fills max_length 64, so that nothing of chosen is left; raise max_length" in said
    assert "line 3: chosen and rejected have the same first 64 tokens" in said
    (tmp_path / "again").mkdir()
    prepared, bad = _built(tmp_path / "again", tokenizer, [PAIR, long_prompt, alike], skip=True)
    assert (prepared.report.records, bad.count) == (1, 2)


@pytest.mark.parametrize(("max_length", "cure"), [(64, False), (10, True)])
def test_max_length_is_blamed_for_answers_that_are_the_same_where_something_is_cut(max_length, cure):
    ids = list(range(10))
    wrong = fault([Sample(ids, ids), Sample(ids, ids)], max_length)
    assert wrong and ("raise max_length" in wrong) is cure


def test_validation_keeps_whole_pairs_apart(tmp_path, tokenizer):
    _built(tmp_path, tokenizer, _many(40), **{"validation.fraction": "0.3"})
    held_out = open_prepared(tmp_path / "made" / "validation")
    assert 4 < held_out.report.pairs < 30 and held_out.report.samples == 2 * held_out.report.pairs


def test_records_of_another_shape_end_a_preparation_for_dpo(tmp_path, tokenizer):
    with pytest.raises(DataError, match="these are messages"):
        _built(tmp_path, tokenizer, [{"messages": [ASKED, _said("x")]}])
    assert tiny.preferences()[0]["chosen"] != tiny.preferences()[0]["rejected"]
