"""Thoughts and template arguments: what is learned under a template like Qwen3's, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from tests.support.chat_templates import EFFORT, MARKED, QWEN3, THINKING, TOOLS
from training.data.encode import Encoder
from training.data.look.take import LookWish, look_into
from training.data.readers import check
from training.data.sample import IGNORED, BadRecord, DataError
from training.data.shapes import recognised
from training.data.source import data_of
from training.data.survey import survey
from training.laptop.adapter.tuned_model import TunedModel
from training.models import tiny
from training.models.card import CardFacts, card
from training.models.names import load_recipe
from training.recipe.reading import parse_recipe
from training.recipe.recipe import RecipeError

pytestmark = pytest.mark.torch

QUESTION = {"role": "user", "content": "q"}
PLAIN = {"role": "assistant", "content": "one"}
THOUGHTFUL = {"role": "assistant", "content": "one", "reasoning_content": "hm"}
IN_CONTENT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"}
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def base():
    return tiny._tokenizer(["the quick brown fox says hello to the world", "您好，世界。你好再来"])


@pytest.fixture
def tokenizer(base):
    yield base
    base.chat_template = tiny.CHAT_TEMPLATE


def _learned(tokenizer, turns, template=QWEN3, args=None, **more):
    """(what is read before it, what is learned) of each sample."""
    tokenizer.chat_template = template
    encoder = Encoder(tokenizer, 1000, "assistant", args)
    found = []
    for sample, _ in encoder.samples(encoder.rendered(recognised({"messages": turns, **more}))):
        first = next(place for place, label in enumerate(sample.labels) if label != IGNORED)
        learned = [label for label in sample.labels if label != IGNORED]
        found.append((tokenizer.decode(sample.ids[:first]), tokenizer.decode(learned)))
    return found


def test_where_thinking_is_off_the_empty_block_is_read_and_the_answer_alone_is_learned(tokenizer):
    ((before, learned),) = _learned(tokenizer, [QUESTION, PLAIN], args=OFF)
    assert before.endswith("assistant\n<think>\n\n</think>\n\n") and learned == "one<|im_end|>"
    ((before, learned),) = _learned(tokenizer, [QUESTION, PLAIN])
    assert before.endswith("assistant\n") and learned == "<think>\n\n</think>\n\none<|im_end|>"


@pytest.mark.parametrize("answer", [THOUGHTFUL, IN_CONTENT], ids=["reasoning_content", "content"])
def test_a_thought_is_learned_wherever_the_record_has_it(tokenizer, answer):
    ((before, learned),) = _learned(tokenizer, [QUESTION, answer])
    assert before.endswith("assistant\n") and learned == "<think>\nhm\n</think>\n\none<|im_end|>"


@pytest.mark.parametrize("of_record", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("of_template", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_learned_whatever_record_and_template_call_it(tokenizer, of_record, of_template):
    template = QWEN3.replace("reasoning_content", of_template)
    ((_, learned),) = _learned(tokenizer, [QUESTION, {**PLAIN, of_record: "hm"}], template)
    assert learned == "<think>\nhm\n</think>\n\none<|im_end|>"
    with pytest.raises(BadRecord, match="turn 2 has thoughts, but"):
        _learned(tokenizer, [QUESTION, {**PLAIN, of_record: "hm"}], template, OFF)


def test_two_different_thoughts_of_one_message_are_refused():
    with pytest.raises(BadRecord, match="turn 2 has different thoughts as reasoning_content and thinking"):
        recognised({"messages": [QUESTION, {**THOUGHTFUL, "thinking": "so"}]})
    with pytest.raises(BadRecord, match="reasoning of turn 2 must be text, found list"):
        recognised({"messages": [QUESTION, {**PLAIN, "reasoning": []}]})


def test_each_answers_thought_is_learned_though_the_template_drops_it_once_a_question_follows(tokenizer):
    last = {"role": "assistant", "content": "two", "reasoning_content": "so"}
    (_, first), (before, second) = _learned(tokenizer, [QUESTION, THOUGHTFUL, QUESTION, last])
    assert first == "<think>\nhm\n</think>\n\none<|im_end|>" and second == "<think>\nso\n</think>\n\ntwo<|im_end|>"
    assert "hm" not in before


@pytest.mark.parametrize("answer", [THOUGHTFUL, IN_CONTENT], ids=["reasoning_content", "content"])
def test_a_thought_is_refused_where_the_arguments_ask_for_none(tokenizer, answer):
    said = "turn 2 has thoughts, but the model's chat template asks for an answer without any"
    with pytest.raises(BadRecord, match=f"{said} .under template_args enable_thinking = false."):
        _learned(tokenizer, [QUESTION, answer], args=OFF)
    with pytest.raises(BadRecord, match=said):
        _learned(tokenizer, [QUESTION, answer], template_args=OFF)


@pytest.mark.parametrize(
    ("template", "answer", "what"),
    [
        (tiny.CHAT_TEMPLATE, THOUGHTFUL, "the reasoning_content"),
        (TOOLS, THOUGHTFUL, "the reasoning_content"),
        (MARKED, THOUGHTFUL, "the reasoning_content"),
        (THINKING, IN_CONTENT, "the thoughts"),
    ],
)
def test_a_thought_that_the_template_drops_is_refused_with_that_sentence(tokenizer, template, answer, what):
    with pytest.raises(BadRecord, match=f"chat template leaves out {what} of turn 2; take it"):
        _learned(tokenizer, [QUESTION, answer], template)


def test_the_file_and_the_line_of_such_a_record_are_told(tokenizer, tmp_path):
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    source = tmp_path / "a.jsonl"
    rows = [{"messages": [QUESTION, answer]} for answer in (PLAIN, THOUGHTFUL, PLAIN)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(data_of(source)).records == 3, "without the model's template nothing is wrong with it"
    tell = lambda *_: None  # noqa: E731
    found, recipe = survey(data_of(source), tell), load_recipe("tiny")
    look = look_into(data_of(source), found, recipe, tokenizer, {}, wish=LookWish(1, False, tell))
    (line,) = look.bad_shown
    assert line.startswith(f"{source} line 2: the model's chat template leaves out the reasoning_content of turn 2")


def test_a_records_own_arguments_go_before_the_recipes(tokenizer):
    for given in ({"template_args": OFF}, {"chat_template_kwargs": OFF}, {"template_args": json.dumps(OFF)}):
        ((before, _),) = _learned(tokenizer, [QUESTION, PLAIN], args={"enable_thinking": True}, **given)
        assert before.endswith("<think>\n\n</think>\n\n")
    ((before, _),) = _learned(tokenizer, [QUESTION, THOUGHTFUL], args=OFF, template_args={"enable_thinking": True})
    assert before.endswith("assistant\n")


def test_reasoning_effort_and_tools_are_given_together(tokenizer):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    ((before, learned),) = _learned(tokenizer, [QUESTION, PLAIN], EFFORT, {"reasoning_effort": "high"}, tools=tools)
    assert "Reasoning: high" in before and '"name": "look"' in before and learned == "one<|im_end|>"


def test_marked_templates_get_the_arguments_too(tokenizer):
    marked = "{%- if enable_thinking %}{{- 'thinking on' }}{%- endif %}" + MARKED
    ((before, learned),) = _learned(tokenizer, [QUESTION, PLAIN], marked, {"enable_thinking": True})
    assert before.startswith("thinking on") and learned.startswith("one<|im_end|>")


def test_an_argument_that_the_template_does_not_read_is_refused_and_those_it_reads_are_named(tokenizer):
    said = "template_args: the model's chat template does not read reasoning_effort; it does enable_thinking"
    with pytest.raises(DataError, match=said):
        _learned(tokenizer, [QUESTION, PLAIN], args={"reasoning_effort": "low"})
    with pytest.raises(BadRecord, match=said):
        _learned(tokenizer, [QUESTION, PLAIN], template_args={"reasoning_effort": "low"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"template_args": [1]}, "template_args must be an object, found list"),
        ({"template_args": "{"}, "template_args: not JSON"),
        (
            {"template_args": {"tools": []}},
            "template_args: 'tools' is nothing to give a chat template; enable_thinking",
        ),
        ({"template_args": {"a b": 1}}, "'a b' is nothing to give a chat template"),
        ({"template_args": {}, "chat_template_kwargs": {}}, "template_args and chat_template_kwargs say the same"),
    ],
)
def test_arguments_that_cannot_be_given_make_a_bad_record(given, said):
    with pytest.raises(BadRecord, match=said):
        recognised({"messages": [QUESTION, PLAIN], **given})


def test_a_recipe_takes_arguments_keeps_them_and_makes_other_data_of_them():
    recipe = load_recipe("tiny", {"template_args.enable_thinking": "false", "template_args.reasoning_effort": "low"})
    assert recipe.template_args == {"enable_thinking": False, "reasoning_effort": "low"}
    assert parse_recipe(recipe.to_toml(), {}, "x") == recipe and load_recipe("tiny").template_args == {}
    assert recipe.data_settings() != load_recipe("tiny").data_settings()
    assert recipe.compute_keys()["template_args.enable_thinking"] is False
    with pytest.raises(RecipeError, match=r"template_args: 'tokenize' is nothing to give a chat template"):
        load_recipe("tiny", {"template_args.tokenize": "false"})


def test_a_tuned_model_is_asked_as_it_was_taught(tokenizer):
    from transformers import GenerationConfig

    from training.node.adapter.decoding import Voice

    tokenizer.chat_template = QWEN3
    voice = Voice(tokenizer, GenerationConfig(), frozenset(), 1000, OFF)
    ((before, _),) = _learned(tokenizer, [QUESTION, PLAIN], args=OFF)
    assert tokenizer.decode(voice.prompt({"messages": [QUESTION]})) == before


def test_its_arguments_come_from_the_runs_recipe_and_stand_on_its_card():
    about = TunedModel("run", 4, None, "model", template_args=OFF)
    assert about.template_argv == ["--template-args", '{"enable_thinking": false}']
    assert TunedModel("run", 4, None, "model").template_argv == []
    text = load_recipe("tiny", {"template_args.enable_thinking": "false"}).to_toml()
    facts = CardFacts("run", 4, text, "b", "d", 1.0, None, (), merged=False)
    assert "`apply_chat_template(..., enable_thinking=False)` asks; ask it so." in card("me/mine", facts)
    assert "apply_chat_template" not in card("me/mine", replace(facts, recipe_text=load_recipe("tiny").to_toml()))


def test_many_different_arguments_fill_no_memory(tokenizer):
    tokenizer.chat_template = "{%- if today %}{{- today }}{%- endif %}" + tiny.CHAT_TEMPLATE
    encoder = Encoder(tokenizer, 1000, "assistant")
    for day in range(70):
        record = recognised({"messages": [QUESTION, PLAIN], "template_args": {"today": f"day {day}"}})
        assert encoder.rendered(record)[0].text.startswith(f"day {day}")
    assert len(encoder._answers) < 70
