"""What of a record is learned, under real tokenizers and the chat templates people have."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from training import tiny
from training.data import IGNORED, DataError
from training.data.encode import Encoder
from training.data.sample import BadRecord
from training.data.shapes import recognised

pytestmark = pytest.mark.torch

HEAD = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
MARKED = (
    HEAD + "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>\\n' }}"
    "{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}" + TAIL
)
"""As training variants of templates are written: the marks take in the end of turn and the newline behind it."""
MARKED_SHORT = MARKED.replace(
    "+ '<|im_end|>\\n' }}{%- endgeneration %}", "}}{%- endgeneration %}{{- '<|im_end|>\\n' }}"
)
"""Marks that leave the end of turn out."""
TWO_ENDS = (
    HEAD + "{{- message.content + '<|im_end|>\\n' }}" + TAIL.replace("{%- endif", "{%- else %}<|endoftext|>{%- endif")
)
"""Phi-3's way: the whole conversation has an end of its own, after the last turn's."""
FORGETFUL = HEAD + (
    "{%- if message.role == 'assistant' and not loop.last %}{{- message.content.split('</think>')[-1] }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}" + TAIL
)
"""Qwen3's way: thoughts are dropped once another turn follows."""
THINKING = FORGETFUL.replace(" and not loop.last", "").replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
"""DeepSeek-R1's way: never a thought in an answer, but the request for one opens it."""
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    + HEAD
    + "{{- message.content }}{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + ' ' }}"
    "{{- call.function.arguments | tojson }}{{- '</call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}" + TAIL
)
TEXT_ARGUMENTS = TOOLS.replace("{{- call.function.arguments | tojson }}", "{{- call.function.arguments + '' }}")

CHAT = {
    "messages": [
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": "您好，世界"},
        {"role": "user", "content": "再来"},
        {"role": "assistant", "content": "second answer"},
    ]
}


@pytest.fixture(scope="module")
def base():
    return tiny._tokenizer(["the quick brown fox says hello to the world", "您好，世界。你好再来"])


@pytest.fixture
def tokenizer(base):
    template, pad, eos = base.chat_template, base.pad_token, base.eos_token
    yield base
    base.chat_template, base.pad_token, base.eos_token = template, pad, eos


def _encoded(tokenizer, record, template=None, max_length=1000, train_on="assistant"):
    if template:
        tokenizer.chat_template = template
    encoder = Encoder(tokenizer, max_length, train_on)
    return [sample for sample, _ in encoder.samples(encoder.rendered(recognised(record)))]


def _learned(tokenizer, sample):
    assert all(label in (IGNORED, token) for token, label in zip(sample.ids, sample.labels, strict=True))
    return tokenizer.decode([label for label in sample.labels if label != IGNORED])


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, MARKED, MARKED_SHORT, TWO_ENDS])
def test_what_the_assistant_says_and_its_end_of_turn_are_learned_and_nothing_else(tokenizer, template):
    (sample,) = _encoded(tokenizer, CHAT, template)
    assert _learned(tokenizer, sample) == "您好，世界<|im_end|>second answer<|im_end|>"
    whole = tokenizer.apply_chat_template(CHAT["messages"], tokenize=True, return_dict=False)
    assert list(sample.ids) == whole


def test_the_marks_of_a_template_are_known_from_its_source(tokenizer):
    found = []
    for template in (tiny.CHAT_TEMPLATE, MARKED, MARKED_SHORT):
        tokenizer.chat_template = template
        found.append(Encoder(tokenizer, 10, "assistant").template.has_generation)
    assert found == [False, True, True]


def test_the_end_of_turn_is_learned_where_the_pad_token_is_the_same(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    (sample,) = _encoded(tokenizer, CHAT)
    assert list(sample.labels).count(tokenizer.pad_token_id) == 2


def test_a_turn_of_weight_0_is_read_but_not_learned(tokenizer):
    turns = [dict(turn) for turn in CHAT["messages"]]
    turns[1]["weight"] = 0
    for template in (tiny.CHAT_TEMPLATE, MARKED):
        (sample,) = _encoded(tokenizer, {"messages": turns}, template)
        assert _learned(tokenizer, sample) == "second answer<|im_end|>"


def test_where_a_template_drops_earlier_thoughts_every_answer_is_learned_as_it_was_given(tokenizer):
    turns = [dict(turn) for turn in CHAT["messages"]]
    turns[1]["content"] = "<think>hm</think>one"
    turns[3]["content"] = "<think>so</think>two"
    first, last = _encoded(tokenizer, {"messages": turns}, FORGETFUL)
    assert _learned(tokenizer, first) == "<think>hm</think>one<|im_end|>"
    assert _learned(tokenizer, last) == "<think>so</think>two<|im_end|>"
    assert "hm" not in tokenizer.decode(last.ids)


@pytest.mark.parametrize("answer", ["four", "<b>four</b>", "<think> no"])
def test_a_request_that_says_more_than_the_answer_shows_takes_nothing_off_it(tokenizer, answer):
    (sample,) = _encoded(tokenizer, {"prompt": "q", "completion": answer}, THINKING)
    assert _learned(tokenizer, sample) == f"{answer}<|im_end|>"
    assert Encoder(tokenizer, 10, "assistant").template.prompt_says_more


def test_a_token_that_reaches_over_the_beginning_of_an_answer_is_learned(tokenizer):
    """Newlines at the beginning of an answer may be one token with the template's own."""
    (sample,) = _encoded(tokenizer, {"prompt": "q", "completion": "\n\nfour"})
    assert _learned(tokenizer, sample).strip() == "four<|im_end|>"


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "天"}'}}]}
TOOL_TURNS = [{"role": "user", "content": "q"}, CALL, {"role": "tool", "content": "rain"}]


@pytest.mark.parametrize("template", [TOOLS, TEXT_ARGUMENTS])
def test_tool_calls_are_learned_and_what_tools_answer_is_not(tokenizer, template):
    record = {"messages": [*TOOL_TURNS, {"role": "assistant", "content": "wet"}], "tools": [{"name": "look"}]}
    (sample,) = _encoded(tokenizer, record, template)
    assert _learned(tokenizer, sample) == '<call>look {"at": "天"}</call><|im_end|>wet<|im_end|>'
    assert '{"name": "look"}' in tokenizer.decode(sample.ids)


def test_everything_is_learned_where_that_is_asked_for(tokenizer):
    (sample,) = _encoded(tokenizer, CHAT, train_on="all")
    assert list(sample.labels) == list(sample.ids)
    assert sample.learned == len(sample.ids) - 1  # nothing comes before the first


def test_a_text_ends_with_the_end_of_text_and_is_learned_whole(tokenizer):
    (sample,) = _encoded(tokenizer, {"text": "从前有座山"})
    assert _learned(tokenizer, sample) == "从前有座山" + tokenizer.eos_token


def test_a_base_model_learns_the_completion_and_to_end_it_and_takes_no_conversations(tokenizer):
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    (sample,) = _encoded(tokenizer, {"prompt": "two plus two is", "completion": " four"})
    assert tokenizer.decode(sample.ids) == "two plus two is four<|endoftext|>"
    assert _learned(tokenizer, sample) == " four<|endoftext|>"
    with pytest.raises(DataError, match="no chat template; use an instruction-tuned model"):
        _encoded(tokenizer, CHAT)


def test_a_tokenizer_that_begins_texts_with_a_token_of_its_own_does_so_here_without_learning_it(tokenizer):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|im_start|>", eos_token="<|endoftext|>"
    )
    inner.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    (sample,) = _encoded(inner, {"text": "hello"})
    assert tokenizer.decode(sample.ids) == "<|im_start|>hello<|endoftext|>"
    assert _learned(tokenizer, sample) == "hello<|endoftext|>"


def test_truncation_cuts_the_end_and_is_told(tokenizer):
    encoder = Encoder(tokenizer, 12, "assistant")
    ((sample, cut),) = encoder.samples(encoder.rendered(recognised(CHAT)))
    assert (len(sample.ids), cut) == (12, True)
    whole = _encoded(tokenizer, CHAT)[0]
    assert list(sample.ids) == list(whole.ids[:12])
    assert list(sample.labels) == list(whole.labels[:12])


def test_a_record_that_the_template_refuses_is_a_bad_record(tokenizer):
    refusing = (
        "{%- if messages[0].content == 'no' %}{{- raise_exception('not that') }}{%- endif %}" + tiny.CHAT_TEMPLATE
    )
    with pytest.raises(BadRecord, match="chat template cannot render it: not that"):
        _encoded(tokenizer, {"prompt": "no", "completion": "x"}, refusing)
    assert _encoded(tokenizer, {"prompt": "yes", "completion": "x"})


def test_an_end_of_turn_that_is_special_among_the_added_tokens_alone_is_found(tokenizer):
    """As makers write it who name their token in added_tokens_decoder and nowhere else."""
    from transformers import AddedToken

    tokenizer.add_tokens(AddedToken("<|turn_end|>", special=True))
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|turn_end|>")
    assert "<|turn_end|>" not in tokenizer.all_special_tokens
    encoder = Encoder(tokenizer, 64, "assistant")
    assert encoder.template.end_of_turn == "<|turn_end|>"
    assert encoder.end_id == tokenizer.convert_tokens_to_ids("<|turn_end|>")


def test_a_template_without_an_end_of_turn_is_told(tokenizer):
    tokenizer.chat_template = HEAD + "{{- message.content + '\\n' }}" + TAIL
    encoder = Encoder(tokenizer, 100, "assistant")
    assert encoder.template.end_of_turn is None and encoder.end_id is None


def test_records_tokenised_together_are_what_each_is_alone(tokenizer):
    encoder = Encoder(tokenizer, 100, "assistant")
    texts = [encoder.rendered(recognised(json.loads(json.dumps(r))))[0] for r in (CHAT, {"text": "a"}, CHAT)]
    together = [sample for sample, _ in encoder.samples(texts)]
    alone = [encoder.samples([text])[0][0] for text in texts]
    assert together == alone
