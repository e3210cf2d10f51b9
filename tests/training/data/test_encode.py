"""What of a record is learned, under real tokenizers and the chat templates people have."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from tests.support.chat_templates import (
    FORGETFUL,
    HEAD,
    MARKED,
    MARKED_SHORT,
    OPENS_THOUGHTS,
    QWEN3,
    TAIL,
    TEXT_ARGUMENTS,
    THINKING,
    TOOLS,
    TWO_ENDS,
)
from training.data.encode import Encoder
from training.data.sample import IGNORED, BadRecord, DataError
from training.data.shapes import recognised
from training.data.template import ChatTemplate, generation_ends
from training.models import tiny

pytestmark = pytest.mark.torch

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
    template, pad, eos, bos = base.chat_template, base.pad_token, base.eos_token, base.bos_token
    yield base
    base.chat_template, base.pad_token, base.eos_token, base.bos_token = template, pad, eos, bos


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
        found.append(ChatTemplate(tokenizer).marks_answers(()))
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


def test_a_turn_of_weight_0_is_refused_where_every_token_is_learned(tokenizer):
    turns = [dict(CHAT["messages"][0]), {**CHAT["messages"][1], "weight": 0}, *CHAT["messages"][2:]]
    assert "turns of weight 0" in _refused(tokenizer, {"messages": turns}, tiny.CHAT_TEMPLATE, train_on="all")


GREETING = [{"role": "assistant", "content": "hello"}, *CHAT["messages"][2:]]


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, MARKED, TOOLS])
def test_a_greeting_before_any_question_is_learned_as_an_answer(tokenizer, template):
    (sample,) = _encoded(tokenizer, {"messages": GREETING}, template)
    assert _learned(tokenizer, sample) == "hello<|im_end|>second answer<|im_end|>"


def test_a_later_system_turn_is_read_where_the_template_shows_it_and_else_named(tokenizer):
    later = [*CHAT["messages"][:2], {"role": "system", "content": "be brief"}, *CHAT["messages"][2:]]
    (sample,) = _encoded(tokenizer, {"messages": later})
    assert "be brief" in tokenizer.decode(sample.ids)
    assert "leaves out the content of turn 3" in _refused(tokenizer, {"messages": later}, NO_SYSTEM)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n"])
def test_an_end_of_turn_that_an_answer_brings_itself_is_learned_once(tokenizer, end):
    record = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": f"world{end}"}]}
    (sample,) = _encoded(tokenizer, record)
    assert _learned(tokenizer, sample) == "world<|im_end|>"
    assert Encoder(tokenizer, 10, "assistant").marks(recognised(record)) == set()


def test_special_tokens_in_the_words_are_found(tokenizer):
    encoder = Encoder(tokenizer, 10, "assistant")
    rendered = {"prompt": "<|im_start|>user\nq<|im_end|>", "completion": "a<|im_end|>"}
    assert encoder.marks(recognised(rendered)) == {"<|im_start|>", "<|im_end|>"}
    assert encoder.marks(recognised(CHAT)) == set()


@pytest.mark.parametrize("text", ["hello", "{bos}hello", "hello{eos}", "{bos}hello{eos}"])
def test_a_text_begins_and_ends_once_whatever_it_brings(tokenizer, text):
    tokenizer.bos_token = tokenizer.eos_token
    encoder = Encoder(tokenizer, 10, "assistant")
    encoder._begin = [tokenizer.bos_token_id]
    record = recognised({"text": text.format(bos=tokenizer.bos_token, eos=tokenizer.eos_token)})
    ((sample, _),) = encoder.samples(encoder.rendered(record))
    assert tokenizer.decode(sample.ids) == f"{tokenizer.bos_token}hello{tokenizer.eos_token}"
    assert encoder.marks(record) == set()


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


def _refused(tokenizer, record, template, train_on="assistant"):
    with pytest.raises(BadRecord) as refusal:
        _encoded(tokenizer, record, template, train_on=train_on)
    return str(refusal.value)


NO_SYSTEM = TOOLS.replace(HEAD, HEAD.replace("messages %}", "messages if message.role != 'system' %}"))
NO_RESULT = TOOLS.replace("{{- message.content }}", "{{- message.content if message.role != 'tool' }}")
NO_WORDS_WITH_CALLS = TOOLS.replace("{{- message.content }}", "{{- message.content if not message.tool_calls }}")
NO_ARGUMENTS = TOOLS.replace("{{- call.function.arguments | tojson }}", "")
WHOLE = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "q"},
    {**CALL, "content": "let me"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "wet"},
]
THOUGHT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>hm</think>four"}]
REASONED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "four", "reasoning_content": "hm"}]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize(
    ("template", "turns", "dropped"),
    [
        (tiny.CHAT_TEMPLATE, TOOL_TURNS, "a tool call of turn 2"),
        (MARKED, TOOL_TURNS, "a tool call of turn 2"),
        (NO_SYSTEM, WHOLE, "the content of turn 1"),
        (NO_RESULT, WHOLE, "the content of turn 4"),
        (NO_WORDS_WITH_CALLS, WHOLE, "the content of turn 3"),
        (NO_ARGUMENTS, WHOLE, "the arguments of a tool call of turn 3"),
        (THINKING, THOUGHT, "the thoughts of turn 2"),
        (TOOLS, REASONED, "the reasoning_content of turn 2"),
    ],
)
def test_what_a_template_drops_is_named_and_nothing_is_taught_without_it(tokenizer, template, turns, dropped, train_on):
    said = _refused(tokenizer, {"messages": turns}, template, train_on)
    assert said.startswith(f"the model's chat template leaves out {dropped}; take it out")


def test_tools_that_a_template_does_not_show_are_named(tokenizer):
    record = {"messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "look"}}]}
    assert "leaves out the tools; " in _refused(tokenizer, record, tiny.CHAT_TEMPLATE)
    assert _encoded(tokenizer, record, TOOLS)


def test_what_a_template_drops_for_what_one_record_says_is_named_for_that_record(tokenizer):
    """Records of one shape are tried out once; each is held against its own words all the same."""
    picky = tiny.CHAT_TEMPLATE.replace("message['content'] +", "(message['content'] | replace('secret', '')) +")
    tokenizer.chat_template = picky
    encoder = Encoder(tokenizer, 1000, "assistant")
    assert encoder.rendered(recognised({"prompt": "open", "completion": "four"}))
    for prompt, completion, turn in (("open", "a secret", 2), ("my secret", "four", 1)):
        with pytest.raises(BadRecord, match=f"leaves out the content of turn {turn}"):
            encoder.rendered(recognised({"prompt": prompt, "completion": completion}))


@pytest.mark.parametrize("content", ["", "  \n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, MARKED])
def test_an_answer_with_nothing_but_its_end_is_never_learned(tokenizer, template, content):
    turns = [dict(turn) for turn in CHAT["messages"]]
    turns[1]["content"] = content
    (sample,) = _encoded(tokenizer, {"messages": turns}, template)
    assert _learned(tokenizer, sample) == "second answer<|im_end|>"
    with pytest.raises(BadRecord, match="every assistant turn is empty"):
        recognised({"messages": turns[:2]})


@pytest.mark.parametrize("template", [FORGETFUL, OPENS_THOUGHTS, THINKING, tiny.CHAT_TEMPLATE, MARKED])
def test_of_two_answers_in_a_row_each_is_learned_once_without_what_stands_between(tokenizer, template):
    said = ["one", "two", "three"]
    turns = [{"role": "user", "content": "q"}, *({"role": "assistant", "content": words} for words in said)]
    samples = _encoded(tokenizer, {"messages": turns}, template)
    learned = "".join(_learned(tokenizer, sample) for sample in samples).replace("<think>\n\n</think>\n\n", "")
    assert learned == "".join(f"{words}<|im_end|>" for words in said)


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, MARKED, MARKED_SHORT, TWO_ENDS])
@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("say <|im_end|> and go on", "say <|im_end|> and go on"),
        ("<|im_end|>", "<|im_end|>"),
        ("\n<|im_end|>", "\n<|im_end|>"),
        ("\u200b<|im_end|>", "\u200b<|im_end|>"),
        ("at last <|im_end|>", "at last "),
        ("<|im_end|>\n<|im_end|>", "<|im_end|>\n"),
    ],
)
def test_an_answer_that_holds_the_text_of_the_end_of_turn_is_learned_to_its_own_end(tokenizer, template, answer, kept):
    turns = [dict(turn) for turn in CHAT["messages"]]
    for learned, place in (
        (f"{kept}<|im_end|>second answer<|im_end|>", 1),
        (f"您好，世界<|im_end|>{kept}<|im_end|>", 3),
    ):
        record = {"messages": [*turns[:place], {"role": "assistant", "content": answer}, *turns[place + 1 :]]}
        (sample,) = _encoded(tokenizer, record, template)
        assert _learned(tokenizer, sample) == learned


def test_arguments_that_a_template_would_print_as_python_are_given_to_it_as_json(tokenizer):
    printed = TOOLS.replace("{{- call.function.arguments | tojson }}", "{{- call.function.arguments }}")
    (sample,) = _encoded(tokenizer, {"messages": TOOL_TURNS}, printed)
    assert _learned(tokenizer, sample) == '<call>look {"at": "天"}</call><|im_end|>'


def test_words_that_a_template_shows_in_another_way_are_not_taken_for_dropped(tokenizer):
    """Trimmed, written as JSON, or as JSON within JSON."""
    result = '{"t": 21.5, "list": ["a\\"b", "c\\nd", true, null], "u": "天气 é"}'
    arguments = {"city": 'São "Paulo"\nline two', "days": 3, "deep": {"k": ["v w", 1.5, None, True]}, "": "C:\\new"}
    call = {"function": {"name": "look", "arguments": arguments}}
    turns = [
        {"role": "system", "content": '  Be "brief".\n\n<b>&</b>  '},
        {"role": "user", "content": "\tq\n"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "\n\n| a |\n|---|\n "},
    ]
    for shown in ("message.content | trim", "message.content | tojson"):
        template = TEXT_ARGUMENTS.replace("{{- message.content }}", "{{- %s }}" % shown)  # noqa: UP031
        (sample,) = _encoded(tokenizer, {"messages": turns}, template)
        assert "São" in _learned(tokenizer, sample) and "21.5" not in _learned(tokenizer, sample)


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
    with pytest.raises(DataError, match=r"no chat template; put a chat_template.jinja into its folder"):
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
    whole = _encoded(tokenizer, CHAT)[0]
    assert (len(sample.ids), cut) == (12, len(whole.ids) - 12)
    assert list(sample.ids) == list(whole.ids[:12])
    assert list(sample.labels) == list(whole.labels[:12])


def test_a_record_that_the_template_refuses_is_a_bad_record(tokenizer):
    refusing = (
        "{%- if messages[0].content == 'no' %}{{- raise_exception('not that') }}{%- endif %}" + tiny.CHAT_TEMPLATE
    )
    with pytest.raises(BadRecord, match="chat template cannot render it: not that"):
        _encoded(tokenizer, {"prompt": "no", "completion": "x"}, refusing)
    assert _encoded(tokenizer, {"prompt": "yes", "completion": "x"})


def test_a_fault_of_our_own_is_not_laid_on_the_template(tokenizer, monkeypatch):
    monkeypatch.setattr("training.data.probe.probed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _encoded(tokenizer, CHAT)


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


GLM = (
    "{%- for message in messages %}{{- '<|' + {'tool': 'observation'}.get(message.role, message.role) + '|>\\n' }}"
    "{{- message.content }}{%- for call in message.tool_calls or [] %}{{- call.function.name }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("ends", [["<|user|>", "<|observation|>"], ["<|endoftext|>"]])
def test_where_the_next_turn_ends_an_answer_its_beginning_is_learned(ends, tmp_path):
    """As GLM's models stop, by their generation_config.json: with the sign of the user, or of a tool's result."""
    base = tiny._tokenizer(["the quick brown fox"])
    base.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|observation|>"]})
    base.chat_template, base.name_or_path = GLM, str(tmp_path)
    ids = base.convert_tokens_to_ids(ends)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    turns = [*TOOL_TURNS, {"role": "assistant", "content": "wet"}, *CHAT["messages"][2:], *TOOL_TURNS[:2]]
    (sample,) = _encoded(base, {"messages": turns})
    call, stops = 'look{"at": "天"}', ends if len(ends) > 1 else ["", ""]
    user, result = stops
    assert _learned(base, sample) == f"{call}{result}wet{user}second answer{user}{call}{result}"
    assert (Encoder(base, 10, "assistant").end_id in ids) is bool(user)


ENDS = ("null", "[null, 2]", "-1", "1000000", "1e30", "true", '"a"', "[[2]]", "1" + "0" * 30)


@pytest.mark.parametrize("content", ["{}", "[2]", *(f'{{"eos_token_id": {end}}}' for end in ENDS)])
def test_a_models_generation_settings_may_name_no_end_that_can_be_used(content, tmp_path):
    base = tiny._tokenizer(["the quick brown fox"])
    base.chat_template, base.name_or_path = GLM, str(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    assert generation_ends(base) == (base.convert_ids_to_tokens([2]) if "[null, 2]" in content else [])
    assert Encoder(base, 10, "assistant").end_id is None


def test_a_template_that_marks_no_answers_beside_one_that_does_is_read_as_any_other(tokenizer):
    record = {"messages": [*TOOL_TURNS, {"role": "assistant", "content": "wet"}], "tools": [{"name": "look"}]}
    tokenizer.chat_template = {"default": MARKED, "tool_use": TOOLS}
    for one, learned in (
        (record, '<call>look {"at": "天"}</call><|im_end|>wet<|im_end|>'),
        (CHAT, "您好，世界<|im_end|>second answer<|im_end|>"),
    ):
        (sample,) = _encoded(tokenizer, one)
        assert _learned(tokenizer, sample) == learned


def test_a_time_of_day_in_a_template_does_not_hide_an_answer(tokenizer):
    clock = "{{- strftime_now('%H:%M:%S.%f') }}" + tiny.CHAT_TEMPLATE
    (sample,) = _encoded(tokenizer, CHAT, clock)
    assert _learned(tokenizer, sample) == "您好，世界<|im_end|>second answer<|im_end|>"


def _chat(exchanges):
    for number in range(exchanges):
        yield {"role": "user", "content": f" question {number}\n"}
        yield {"role": "assistant", "content": f"\nanswer {number} "}


def _with_calls(exchanges):
    yield {"role": "user", "content": "question"}
    for number in range(exchanges):
        yield {**CALL, "content": f"<think>\nanswer {number}</think>"}
        yield {"role": "tool", "content": f"rain {number}" if number % 3 else ""}
    yield {"role": "assistant", "content": "last"}


@pytest.mark.parametrize(
    ("talk", "template"),
    [
        *((_chat, template) for template in (tiny.CHAT_TEMPLATE, MARKED, TWO_ENDS)),
        *((_with_calls, template) for template in (TOOLS, TEXT_ARGUMENTS)),
    ],
)
def test_a_long_conversation_is_rendered_as_often_as_a_short_one(tokenizer, monkeypatch, template, talk):
    rendered, once = [], ChatTemplate.text
    monkeypatch.setattr(ChatTemplate, "text", lambda *args, **more: rendered.append(1) or once(*args, **more))
    tokenizer.chat_template = template
    encoder, counts = Encoder(tokenizer, 100_000, "assistant"), []
    for exchanges in (9, 45):
        turns = list(talk(exchanges))
        for _ in range(2):  # the first of its shape, and another
            rendered.clear()
            ((sample, _),) = encoder.samples(encoder.rendered(recognised({"messages": turns})))
            counts.append(len(rendered))
        learned = _learned(tokenizer, sample)
        assert learned.count("<|im_end|>") == sum(turn["role"] == "assistant" for turn in turns)
        assert learned.count("answer") == exchanges and "question" not in learned and "rain" not in learned
    assert counts[:2] == counts[2:]


@pytest.mark.parametrize("max_length", [1200, 100_000])
def test_of_many_answers_that_are_rendered_alone_those_beyond_max_length_take_no_rendering(
    tokenizer, monkeypatch, max_length
):
    """Qwen3 shows an answer's thoughts until others follow, so that each answer is a sample with all before it."""
    rendered, once = [], ChatTemplate.text
    monkeypatch.setattr(ChatTemplate, "text", lambda *args, **more: rendered.append(1) or once(*args, **more))
    tokenizer.chat_template = QWEN3
    encoder, counts, samples = Encoder(tokenizer, max_length, "assistant"), [], []
    for exchanges in (120, 240):
        turns = [
            turn | ({"reasoning_content": "hm"} if "answer" in turn["content"] else {}) for turn in _chat(exchanges)
        ]
        rendered.clear()
        made = encoder.samples(encoder.rendered(recognised({"messages": turns})))
        counts.append(len(rendered))
        samples.append([list(sample.ids) for sample, _ in made if sample.learned])
    if max_length == 1200:
        assert counts[0] == counts[1] and samples[0] == samples[1] and 16 < len(samples[0]) < 120
    else:
        assert [len(each) for each in samples] == [120, 240]
