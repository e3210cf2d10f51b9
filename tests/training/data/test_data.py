"""Data from files to records: which shapes are known, what is refused and where, and reading without holding."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from training.data.hub import HubDataSet, on_hub
from training.data.order import Order, micro_batches
from training.data.questions import read_questions
from training.data.readers import check, records
from training.data.sample import Bad, BadRecord, DataError
from training.data.shapes import recognised
from training.data.source import data_files, data_of, data_sha256, ignored_files_note, placed
from training.data.splits import chosen_files
from training.recipe.strategy_rules import micro_steps

ROOT = Path(__file__).parents[3]
PAIR = {"prompt": "two plus two?", "completion": "four"}
CHAT = {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！有什么可以帮您？"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "上海"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def _turn(role, content, **more):
    return {"role": role, "content": content, **more}


ASKING = [
    _turn("user", "上海天气?"),
    _turn("assistant", None, tool_calls=[CALL]),
    _turn("tool", "雨", tool_call_id="c1"),
]


def _file(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    encoded = (x if isinstance(x, bytes) else json.dumps(x, ensure_ascii=False).encode() for x in lines)
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def _said(record):
    return [(turn["role"], turn["content"]) for turn in recognised(record).turns]


def test_messages_keep_every_turn_with_its_tool_calls_and_tools():
    found = recognised({"messages": [*ASKING, _turn("assistant", "下雨。")], "tools": TOOLS, "id": 7})
    assert found.shape == "messages"
    assert [turn["role"] for turn in found.turns] == ["user", "assistant", "tool", "assistant"]
    assert found.turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "上海"}}
    assert found.turns[2]["tool_call_id"] == "c1"
    assert found.tools == tuple(TOOLS)
    assert recognised({**CHAT, "tools": json.dumps(TOOLS)}).tools == tuple(TOOLS)


@pytest.mark.parametrize(
    ("call", "result", "answer"),
    [
        ("function_call", "observation", "gpt"),
        ("tool_call", "tool_response", "assistant"),
        ("tool_call", "function", "model"),
        *(("function_call", "tool", vendor) for vendor in ("chatgpt", "bing", "bard")),
    ],
)
def test_the_roles_of_other_tools_and_vendors_are_known(call, result, answer):
    called = json.dumps(CALL["function"] | {"arguments": {"city": "上海"}})
    turns = [_turn("human", "上海天气?"), _turn(call, called), _turn(result, "雨"), _turn(answer, "下雨。")]
    assert recognised({"messages": turns}).turns == recognised({"messages": [*_asking({"city": "上海"})]}).turns


def _asking(arguments, **more):
    function = {"name": "weather"} | ({} if arguments is ... else {"arguments": arguments})
    yield _turn("user", "上海天气?")
    yield {"role": "assistant", "content": "", "tool_calls": [{"function": function}]} | more
    yield from (_turn("tool", "雨"), _turn("assistant", "下雨。"))


@pytest.mark.parametrize("arguments", [..., "", " ", None, {}, "{}"])
def test_a_call_may_have_no_arguments(arguments):
    calls = recognised({"messages": [*_asking(arguments)]}).turns[1]["tool_calls"]
    assert calls == [{"type": "function", "function": {"name": "weather", "arguments": {}}}]


@pytest.mark.parametrize(
    "written",
    [
        {"tool_calls": json.dumps([CALL | {"id": 7}])},
        {"tool_calls": [CALL | {"id": 7}], "content": []},
        {"tool_calls": None, "function_call": CALL["function"], "id": 7},
    ],
)
def test_calls_in_other_spellings_are_the_same(written):
    (call,) = recognised({"messages": [*_asking({}, **written)]}).turns[1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "上海"}}
    assert call.get("id", "7") == "7"


@pytest.mark.parametrize("arguments", [{"city": "上海"}, '{"city": "上海"}'])
def test_arguments_may_be_called_parameters(arguments):
    function = {"name": "weather", "parameters": arguments}
    for call in (function, {"function": function}):
        called = {"messages": [*_asking({}, tool_calls=[call])]}
        spoken = [
            _turn("human", "q"),
            _turn("function_call", json.dumps(call)),
            _turn("observation", "雨"),
            GREETING[2],
        ]
        for record in (called, {"conversations": spoken}):
            (made,) = recognised(record).turns[1]["tool_calls"]
            assert made["function"] == {"name": "weather", "arguments": {"city": "上海"}}


WHERE = {"city": "上海"}
UNREAD = {
    **{key: {"name": "weather", key: WHERE} for key in ("args", "input", "argument", "params")},
    "arguments": {"name": "weather", "arguments": {"city": "北京"}, "parameters": WHERE},
    "parameters": {"function": {"name": "weather", "arguments": WHERE}, "parameters": {"city": "北京"}},
}


@pytest.mark.parametrize("empty", [{}, "{}", " ", None])
def test_empty_arguments_hide_none_that_stand_beside_them(empty):
    function = {"name": "weather", "arguments": empty}
    for call in (function | {"parameters": WHERE}, {"function": function, "arguments": WHERE}):
        (made,) = recognised({"messages": [*_asking({}, tool_calls=[call])]}).turns[1]["tool_calls"]
        assert made["function"] == {"name": "weather", "arguments": WHERE}


@pytest.mark.parametrize("key", UNREAD)
def test_arguments_under_a_key_that_nobody_reads_or_beside_others_are_refused_by_their_key(key):
    for turns in (_asking({}, tool_calls=[UNREAD[key]]), [ASKING[0], _turn("tool_call", json.dumps(UNREAD[key]))]):
        with pytest.raises(BadRecord) as refused:
            recognised({"messages": [*turns]})
        assert key in str(refused.value).split()


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ({"prompt": "q", "chosen": ["yes"], "rejected": ["no"]}, {"chosen:", "text"}),
        ({"chosen": "\n\nHuman: q", "rejected": "\n\nHuman: r"}, {"chosen", "rejected", "prompt,", "turns"}),
        ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, {"conversations", "from,", "value"}),
        ({"prompt": ["q", "r"], "completion": ["a", "b"]}, {"completion", "text"}),
    ],
)
def test_what_stands_in_place_of_turns_is_named_with_its_key(record, names):
    with pytest.raises(BadRecord) as refused:
        recognised(record)
    assert names <= {*str(refused.value).split()}


@pytest.mark.parametrize(
    ("bad", "more"),
    [
        (True, {"function_call": {"name": "other", "arguments": "{}"}}),
        (False, {"function_call": {"name": "weather", "arguments": '{"city": "上海"}'}}),
        (True, {"role": "tool_call", "tool_calls": None, "function_call": CALL["function"], "content": "[]"}),
    ],
)
def test_a_second_spelling_of_a_turns_calls_says_the_same(bad, more):
    turns = [*ASKING, _turn("assistant", "下雨。")]
    turns[1] = turns[1] | more
    if bad:
        with pytest.raises(BadRecord):
            recognised({"messages": turns})
    else:
        assert recognised({"messages": turns}).turns == recognised({"messages": [*ASKING, turns[3]]}).turns


@pytest.mark.parametrize("calls", [{"function_call": CALL["function"]}, {"tool_calls": [CALL]}])
def test_the_assistant_alone_calls(calls):
    with pytest.raises(BadRecord):
        recognised({"messages": [ASKING[0], _turn("user", "q") | calls, GREETING[0]]})


TYPED = [
    [{"type": "flight", "id": 1}, {"type": "hotel"}],
    [{"type": "text", "text": "a"}, {"type": "hotel"}],
    [{"type": ["text"]}],
    [{"type": 1}],
]


@pytest.mark.parametrize("value", [{"rain": 0, "in": "上海"}, [1, {"a": "b"}], [{"a": "b"}], 21.5, *TYPED])
def test_what_a_tool_gives_may_be_any_value(value):
    turns = [*ASKING[:2], _turn("tool", value, tool_call_id=7), _turn("assistant", "下雨。")]
    result = recognised({"messages": turns}).turns[2]
    assert json.loads(result["content"]) == value and result["tool_call_id"] == "7"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio"])
def test_a_tool_that_gives_more_than_text_makes_a_bad_record_and_its_parts_of_text_are_its_content(kind):
    parts = [{"type": "text", "text": "雨"}, {"type": "text", "text": "。"}]
    assert _said({"messages": [*ASKING[:2], _turn("tool", parts), _turn("assistant", "下雨。")]})[2] == ("tool", "雨。")
    with pytest.raises(BadRecord):
        recognised({"messages": [*ASKING[:2], _turn("tool", [*parts, {"type": kind}]), _turn("assistant", "下雨。")]})


@pytest.mark.parametrize("value", [date(2026, 1, 1), Decimal("1.50"), b"\xff", float("nan"), [{"a": float("inf")}]])
def test_a_value_of_parquet_that_no_json_has_makes_a_bad_record_wherever_the_model_would_see_it(value):
    call, answer = _turn("assistant", "", tool_calls=[{"name": "weather"}]), _turn("assistant", "下雨。")
    calls = [{"name": "weather", "arguments": {"a": value}}]
    for record in (
        {"messages": [ASKING[0], call, _turn("tool", {"a": value}), answer]},
        {"messages": [ASKING[0], _turn("assistant", "", tool_calls=calls)]},
        {**CHAT, "tools": [TOOLS[0] | {"a": value}]},
        {**CHAT, "template_args": {"a": value}},
    ):
        with pytest.raises(BadRecord):
            recognised(record)
    assert recognised({"messages": [turn | {"timestamp": value} for turn in CHAT["messages"]]}) == recognised(CHAT)


def test_a_call_may_be_written_as_text():
    turns = [_turn("user", "q"), _turn("assistant", '<call>{"name": "look"}</call>'), _turn("tool", "y")]
    assert _said({"messages": turns}) == [(turn["role"], turn["content"]) for turn in turns]


def test_a_message_of_weight_0_is_context_only():
    turns = [
        _turn("user", "a"),
        _turn("assistant", "b", weight=0),
        _turn("user", "c"),
        _turn("assistant", "d", weight=1),
    ]
    assert recognised({"messages": turns}).not_learned == {1}


@pytest.mark.parametrize("key", ["weight", "loss_weight", "loss", "train", "training"])
@pytest.mark.parametrize(
    "speaks", [("messages", "role", "content", "assistant"), ("conversations", "from", "value", "gpt")]
)
def test_what_says_that_a_turn_is_not_learned_is_kept_to_in_every_spelling(key, speaks):
    talk, who, what, assistant = speaks
    turns = [{who: "user", what: "a", key: 0.0}, {who: assistant, what: "b", key: False}]
    turns += [{who: "user", what: "c", key: None}, {who: assistant, what: "d", key: 1.0, "id": 7, "mood": "fine"}]
    found = recognised({talk: turns})
    assert (found.not_learned, found.weighed) == ({1}, True)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"weight": 0.5}, "weight 0.5"),
        ({"loss": "false"}, "loss 'false'"),
        ({"weight": 1, "train": False}, "different weight and train"),
        ({"use_this": False}, "use_this False"),
        ({"loss_scale": 0.3}, "loss_scale 0.3"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail"),
        ({"mask": "user"}, "mask 'user'"),
    ],
)
def test_a_key_of_a_turn_that_may_decide_what_is_learned_is_named(more, named):
    with pytest.raises(BadRecord, match=re.escape(named)):
        recognised({"messages": [_turn("user", "a"), _turn("assistant", "b", **more)]})


def test_a_users_turn_that_asks_to_be_learned_is_named():
    with pytest.raises(BadRecord, match="turn 1 has the train True, but only the assistant"):
        recognised({"messages": [_turn("user", "a", train=True), _turn("assistant", "b")]})


@pytest.mark.parametrize(
    "more",
    [{"label": False}, {"label": "True"}, {"kto_tag": True}, {"weight": 0.5}, {"sample_weight": 2}, {"train": False}],
)
def test_a_key_of_a_record_that_decides_what_is_learned_is_refused_by_name(more):
    with pytest.raises(BadRecord, match=next(iter(more))):
        recognised(CHAT | more)


def test_other_columns_are_read_over_and_named():
    more = {"id": 7, "source": "web", "label": 3, "weight": 1, "is_safe": False, "prompt": "x", "n": None}
    assert recognised(CHAT | more).ignored == {"id", "source", "label", "is_safe", "prompt"}
    assert recognised(PAIR | {"png": b"\x89PNG\xff"}).ignored == {"png"}


GREETING = [_turn("assistant", "Hello."), _turn("user", "q"), _turn("assistant", "a")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": json.dumps(CHAT["messages"])}, None),
        ({"conversations": CHAT["messages"]}, None),
        (
            {
                "messages": [
                    {"from": "human", "value": "你好"},
                    {"from": "gpt", "value": CHAT["messages"][1]["content"]},
                ]
            },
            None,
        ),
        (
            {
                "messages": [
                    _turn(
                        t["role"],
                        [{"type": "text", "text": t["content"][:1]}, {"type": "text", "text": t["content"][1:]}],
                    )
                    for t in CHAT["messages"]
                ]
            },
            None,
        ),
        ({"messages": [list(turn.items()) for turn in CHAT["messages"]]}, None),
        (CHAT | {"system": "s"}, [("system", "s"), ("user", "你好"), ("assistant", CHAT["messages"][1]["content"])]),
        ({"messages": [_turn("developer", "s"), *GREETING[1:]]}, [("system", "s"), ("user", "q"), ("assistant", "a")]),
        ({"messages": GREETING}, [("assistant", "Hello."), ("user", "q"), ("assistant", "a")]),
        (
            {"messages": [GREETING[1], _turn("system", "s"), GREETING[2]]},
            [("user", "q"), ("system", "s"), ("assistant", "a")],
        ),
        ({"instruction": b"q", "output": "a"}, [("user", "q"), ("assistant", "a")]),
    ],
)
def test_a_conversation_is_the_same_in_every_spelling(record, said):
    assert _said(record) == (said or [(turn["role"], turn["content"]) for turn in CHAT["messages"]])


def test_turns_that_are_text_but_no_json_are_said_to_be():
    with pytest.raises(BadRecord, match="messages is text that is not JSON"):
        recognised({"messages": "[{'role': 'user'}]"})


def test_nulls_of_objects_are_absent_and_those_of_json_text_are_kept():
    def calls(arguments):
        call = {"id": None, "function": {"name": "f", "arguments": arguments}}
        found = recognised(
            {"messages": [_turn("user", "q"), _turn("assistant", None, tool_calls=[call])], "tools": TOOLS}
        )
        return found.turns[1]["tool_calls"][0]["function"]["arguments"]

    assert calls({"a": None, "b": [{"c": None}]}) == {"b": [{}]}
    assert calls('{"a": null}') == {"a": None}


def test_alpaca_joins_instruction_and_input_and_knows_system_and_history():
    assert _said({"instruction": "翻译", "input": "hello", "output": "你好"}) == [
        ("user", "翻译\nhello"),
        ("assistant", "你好"),
    ]
    record = {"instruction": "q2", "input": "", "output": "a2", "system": "s", "history": [["q1", "a1"]]}
    assert [text for _, text in _said(record)] == ["s", "q1", "a1", "q2", "a2"]


def test_sharegpt_knows_its_speakers_tool_calls_included():
    speakers = ["system", "human", "function_call", "observation", "gpt"]
    values = ["s", "q", '{"name": "weather", "arguments": {"city": "x"}}', "rain", "it rains"]
    record = {"conversations": [{"from": f, "value": v} for f, v in zip(speakers, values, strict=True)]}
    found = recognised(record)
    assert found.shape == "sharegpt"
    assert [turn["role"] for turn in found.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.turns[2]["tool_calls"][0]["function"]["arguments"] == {"city": "x"}


def test_prompt_and_completion_are_texts_or_lists_of_turns_of_which_only_the_completion_is_learned():
    assert (recognised(PAIR).prompt, recognised(PAIR).completion) == ("two plus two?", "four")
    before = [_turn("user", "a"), _turn("assistant", "b"), _turn("user", "c")]
    rate = '{"from": "USD", "value": 3}'
    assert recognised({"prompt": "how much?", "completion": rate}).completion == rate
    found = recognised({"prompt": before, "completion": [_turn("assistant", "d")]})
    assert (found.shape, found.not_learned, found.weighed) == ("prompt/completion", {1}, False)


def test_plain_text_is_all_completion():
    found = recognised({"text": "从前有座山"})
    assert (found.shape, found.turns, found.completion) == ("text", (), "从前有座山")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"messages": [', "not JSON: Expecting value at character 16"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        (b'{"text": "a\x00b"}', "not JSON: Invalid control character"),
        (b'{"text": "a\\u0000b"}', "text holds a NUL character"),
        (b'{"text": "a\\ud83db"}', "half of a surrogate pair"),
        (b'{"text": NaN}', "NaN is no JSON value"),
        (b'{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": 1' + b"0" * 5000 + b"}", "not JSON"),
        ([1], "an object is expected, found list"),
        (
            {"txt": "x"},
            "none of messages, conversations, prompt and completion, instruction and output, chosen and rejected, or ",
        ),
        ({"text": " "}, "text is empty"),
        ({"text": 4}, "text must be text, found number"),
        ({"messages": []}, "an empty list"),
        ({"messages": [_turn("user", "x")]}, "no assistant turn"),
        ({"messages": [_turn("assistant", "x")]}, "no user turn"),
        ({"messages": [_turn("user", "x"), _turn("bot", "y")]}, "role 'bot'"),
        ({"messages": [_turn("user", "x"), _turn(["user"], "y")]}, "role ['user']"),
        ({"messages": [_turn("user", "x"), {"role": "assistant"}]}, "turn 2 needs a role and a content of text"),
        ({"messages": [_turn("user", ["x"])]}, "turn 1 needs a role and a content of text, found list"),
        ({"messages": [_turn("user", [{"type": "text", "text": "x"}, {"type": "image"}])]}, "turn 1 has image in its"),
        ({"messages": [_turn("user", "a") | {"audio": {"id": "x"}}, _turn("assistant", "b")]}, "turn 1 has audio"),
        (CHAT | {"images": ["x.png"]}, "it has images, and text alone is learned"),
        ({"messages": [_turn("user", "x"), _turn("tool", "y"), _turn("assistant", "z")]}, "none was made before it"),
        ({"messages": [ASKING[0], _turn("assistant", None, tool_calls=[{"id": 1}])]}, "needs a function with a name"),
        ({"messages": [_turn("user", "x"), _turn("assistant", "y", weight=0.5)]}, "weight 0.5"),
        ({"messages": CHAT["messages"], "tools": True}, "tools must be a list of objects"),
        ({"conversations": [{"from": "human", "value": 1}]}, "turn 1 needs a role and a content of text, found number"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "role 'bot'"),
        ({"instruction": "", "input": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "input": 3, "output": "x"}, "input must be text"),
        ({"instruction": "x", "output": "x", "history": [["a"]]}, "pairs of question and answer"),
        ({"prompt": "x", "completion": " "}, "completion is empty"),
        ({"prompt": "x", "completion": 4}, "both be text or both be lists of turns, found text and number"),
        (PAIR, "prompt/completion, but the records before are messages"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, bad, reason):
    path = _file(tmp_path, CHAT, CHAT, bad)
    with pytest.raises(DataError) as caught:
        check(data_of(path))
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert reason in str(caught.value)


def test_bad_records_are_told_by_what_is_wrong_with_them(tmp_path):
    path = _file(tmp_path, CHAT, *[b'{"x": 1', b'{"x": 123'] * 3, b'{"x": NaN}', b'{"x": NaN}', {"messages": 1})
    with pytest.raises(DataError) as caught:
        check(data_of(path))
    cut, constant, shape = str(caught.value).splitlines()
    assert cut.startswith("6 records: the first not JSON: ") and "at character " in cut
    assert cut.endswith(f" ({path} lines 2, 3, 4, ...)")
    assert constant.startswith("2 records: not JSON: NaN") and constant.endswith(f" ({path} lines 8, 9)")
    assert shape.startswith(f"{path} line 10: ")


def test_places_in_several_files_are_each_named_whole():
    bad = Bad(skip=True)
    for place in ("a.jsonl line 3", "b.jsonl line 1"):
        bad.add(place, "no assistant turn")
    assert bad.shown == ["2 records: no assistant turn (a.jsonl line 3, b.jsonl line 1)"]


def test_of_many_reasons_the_first_are_told_and_the_records_with_others_counted():
    bad = Bad(skip=True, most=2)
    for number, why in enumerate("aabcc", start=1):
        bad.add(f"x.csv line {number}", why)
    assert bad.shown == ["2 records: a (x.csv lines 1, 2)", "x.csv line 3: b"]
    assert (bad.count, bad.more) == (5, 2)


def test_bad_records_are_counted_and_left_out_where_that_is_asked_for(tmp_path):
    path = _file(tmp_path, CHAT, b"{", {"messages": 1}, CHAT, b"x", b"y", b"z")
    with pytest.raises(DataError, match=r"line 2: not JSON(.|\n)*line 3(.|\n)*3 records: not JSON.*lines 5, 6, 7\)$"):
        check(data_of(path))
    summary = check(data_of(path), skip_bad=True)
    assert (summary.records, summary.bad) == (2, 5)
    with pytest.raises(DataError, match=r"no record in it but 1 bad: .*line 1: not JSON"):
        check(data_of(_file(tmp_path, b"{")), skip_bad=True)


def test_a_byte_order_mark_carriage_returns_and_blank_lines_are_no_part_of_a_record(tmp_path):
    plain = _file(tmp_path, CHAT, CHAT)
    line = plain.read_bytes().splitlines()[0]
    path = _file(tmp_path, b"\xef\xbb\xbf" + line + b"\r", b"", b"\r", line, name="windows.jsonl")
    assert [r for _, r in records(data_of(path), Bad(False))] == [r for _, r in records(data_of(plain), Bad(False))]
    assert data_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_json_file_is_an_array_or_lines(tmp_path):
    array = tmp_path / "a.json"
    array.write_text(json.dumps([CHAT, CHAT, CHAT], indent=1))
    assert check(data_of(array)).records == 3
    array.write_text(json.dumps([CHAT, {"messages": 3}]))
    with pytest.raises(DataError, match="record 2: messages must be a list"):
        check(data_of(array))
    assert check(data_of(_file(tmp_path, CHAT, CHAT, name="lines.json"))).records == 2
    array.write_text("[1, 2")
    with pytest.raises(DataError, match=r"a\.json: not JSON"):
        check(data_of(array))


def test_a_json_file_that_is_one_object_over_lines_is_one_record_good_or_bad(tmp_path):
    config = tmp_path / "config.json"
    for text in (json.dumps({"model_type": "qwen2", "rope": {"theta": 1}}, indent=2), '\ufeff{"data":\n[]}'):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=r"config\.json record 1: none of messages.*keys: (model_type, rope|data)$"):
            check(data_of(config))
    config.write_text(json.dumps({"text": "it is a record"}, indent=2))
    assert check(data_of(config)).records == 1
    config.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert check(data_of(config)).records == 2
    config.write_text('{"text"\n{"text": "b"}\n')
    assert check(data_of(config), skip_bad=True).records == 1


def test_parquet_is_read_row_by_row_and_a_bad_row_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([CHAT, {"messages": [*ASKING, _turn("assistant", "雨")]}] * 300), path
    )
    found = [record for _, record in records(data_of(path), Bad(False))]
    assert len(found) == 600
    assert found[0] == recognised(CHAT)  # the null fields a Parquet struct is filled up with do not show
    assert found[1].turns[1]["tool_calls"][0]["function"]["arguments"] == {"city": "上海"}
    calls = [{"function": {"name": "look", "arguments": arguments}} for arguments in ({"at": "x"}, {"on": "y"})]
    asked = [[_turn("user", "q"), {"role": "assistant", "tool_calls": [call]}] for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns} for turns in asked]), path)
    given = [record.turns[1]["tool_calls"][0]["function"] for _, record in records(data_of(path), Bad(False))]
    assert given == [call["function"] for call in calls]
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}, {"text": None}]), path)
    with pytest.raises(DataError, match=r"data\.parquet row 2: none of messages"):
        check(data_of(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="not readable as Parquet"):
        check(data_of(path))


def test_maps_and_bytes_of_parquet_are_objects_and_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    turns = [[("role", "user"), ("content", "q")], [("role", "assistant"), ("content", "a")]]
    maps = pyarrow.array([turns], pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string())))
    parquet.write_table(pyarrow.table({"messages": maps}), tmp_path / "map.parquet")
    parquet.write_table(pyarrow.table({"messages": [json.dumps(CHAT["messages"]).encode()]}), tmp_path / "text.parquet")
    assert [len(record.turns) for _, record in records(data_of(tmp_path), Bad(False))] == [2, 2]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_columns_that_nobody_reads_need_no_value_that_python_has_and_a_name_stands_once(tmp_path, suffix):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def written(names, *columns):
        table, path = pyarrow.Table.from_arrays([pyarrow.array(["a", "b"]), *columns], names), tmp_path / f"a{suffix}"
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
        return path

    far = pyarrow.array([10**15, None], pyarrow.timestamp("s"))
    elsewhere = pyarrow.array([1, 2], pyarrow.timestamp("s", "No/Where"))
    read = list(records(data_of(written(["text", "year", "at"], far, elsewhere)), Bad(False)))
    assert [(record.completion, record.ignored) for _, record in read] == [("a", {"year", "at"}), ("b", {"at"})]
    assert check(data_of(written(["text", "label"], far)), skip_bad=True).bad == 1
    with pytest.raises(DataError) as refusal:
        check(data_of(written(["text", "text"], pyarrow.array(["x", "y"]))))
    assert "'text'" in str(refusal.value)


@pytest.mark.parametrize("wrong", ['{"city": 1, "city": 2}', '{"far": 1e999}', '{"far": [-Infinity]}'])
def test_json_in_a_text_is_held_to_what_json_outside_is(tmp_path, wrong):
    call = {"function": {"name": "weather", "arguments": wrong}}
    said = _turn("function_call", f'{{"name": "weather", "arguments": {wrong}}}')
    texts = [
        {"messages": [ASKING[0], _turn("assistant", None, tool_calls=[call])]},
        {"messages": [ASKING[0], said]},
        {**CHAT, "tools": f"[{wrong}]"},
        {**CHAT, "template_args": wrong},
    ]
    outside = json.dumps({**CHAT, "id": 0})[:-2].encode() + wrong.encode() + b"}"
    assert check(data_of(_file(tmp_path, CHAT, *texts, outside)), skip_bad=True).bad == 5


@pytest.mark.parametrize("lines", [[PAIR] * 2, [json.dumps(PAIR, indent=1).encode()] * 2])
def test_a_byte_order_mark_where_two_files_were_joined_is_taken_off(tmp_path, lines):
    path = _file(tmp_path, lines[0])
    path.write_bytes((b"\xef\xbb\xbf" + path.read_bytes()) * 2)
    assert check(data_of(path)).records == 2


@pytest.mark.parametrize(("weight", "bad"), [("1", 0), ("1.0", 0), ("True", 0), ("0", 1), ("0.5", 1)])
def test_a_weight_of_a_whole_record_may_be_text_as_a_csv_has_it(tmp_path, weight, bad):
    path = _file(tmp_path, b"prompt,completion,weight", f"a,b,{weight}".encode(), b"c,d,1", name="a.csv")
    assert check(data_of(path), skip_bad=True).bad == bad


@pytest.mark.parametrize("nothing", ["\u200b", "\ufeff\u2060 \u00ad", "\x07\n", "\u3164", "\u2800\uffa0", "\ufe0f"])
def test_an_answer_that_shows_nothing_is_empty(nothing):
    for record in (
        {"messages": [_turn("user", "a"), _turn("assistant", nothing)]},
        {"prompt": "a", "completion": nothing},
        {"text": nothing},
    ):
        with pytest.raises(BadRecord):
            recognised(record)
    both = recognised({"messages": [*CHAT["messages"], _turn("user", "a"), _turn("assistant", nothing)]})
    assert both.not_learned == {3}


def test_a_folder_of_save_to_disk_is_read_and_of_splits_the_training_one(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for split, text in (("train", "one"), ("test", "two")):
        (tmp_path / split).mkdir()
        table = pyarrow.table({"text": [text, None, "three"]})
        with pyarrow.ipc.new_stream(tmp_path / split / "data-00000-of-00001.arrow", table.schema) as out:
            out.write_table(table)
        for name in ("dataset_info.json", "state.json"):
            (tmp_path / split / name).write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    bad = Bad(True)
    assert [record.completion for _, record in records(data_of(tmp_path), bad)] == ["one", "three"] and bad.count == 1
    assert check(data_of(tmp_path / "test"), skip_bad=True).records == 2
    assert "test/data-00000-of-00001.arrow" in ignored_files_note(tmp_path)
    (tmp_path / "test" / "data-00000-of-00001.arrow").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="not readable as Arrow"):
        check(data_of(tmp_path / "test"))


def test_files_named_like_held_out_data_that_are_learned_too_are_said(tmp_path):
    for name in ("train.jsonl", "validation.jsonl", "latest.jsonl"):
        _file(tmp_path, {"text": "a"}, name=name)
    assert ignored_files_note(tmp_path).endswith("held-out data: validation.jsonl")
    (tmp_path / "train.jsonl").unlink()
    assert ignored_files_note(tmp_path) == ""


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    _file(folder, {"text": "two"}, name="b.jsonl")
    _file(folder, {"text": "one"}, name="a.json")
    _file(folder, b"rubbish", name=".hidden.jsonl")
    _file(folder, b"rubbish", name="README.md")
    assert [record.completion for _, record in records(data_of(folder), Bad(False))] == ["one", "two"]
    before = data_sha256(folder)
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    assert data_sha256(folder) != before


def _zip(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("[Content_Types].xml", *names):
            archive.writestr(name, "你好")
    return path


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (("xl/workbook.xml",), "this is an Office file or a zip archive"),
        (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600), "this is an Office file"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "this is a PDF"),
        (gzip.compress(b'{"text": "one"}\n', mtime=0), "this is packed with gzip"),
    ],
)
def test_a_file_of_another_kind_that_was_renamed_is_named_by_what_it_is(tmp_path, content, said, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(content) if isinstance(content, bytes) else _zip(path, *content)
    with pytest.raises(DataError, match=rf"data\.{suffix}: {said}"):
        check(data_of(path))


def test_parquet_under_another_name_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl: this is Parquet by its first bytes"):
        check(data_of(_file(tmp_path, b"PAR1\x15\x04\x15", name="a.jsonl")))


def test_a_prompt_file_of_another_kind_is_named(tmp_path):
    with pytest.raises(DataError, match="an Office file"):
        read_questions(_zip(tmp_path / "prompts.jsonl", "xl/workbook.xml"))


@pytest.mark.parametrize("who", ["function_call", "tool_call", None])
def test_a_prompt_record_that_ends_in_a_call_asks_what_stands_before_it(tmp_path, who):
    call = _turn(who, json.dumps(CALL["function"])) if who else ASKING[1]
    turns = [_turn("user", "a"), _turn("assistant", "b"), ASKING[0], call]
    assert read_questions(_file(tmp_path, {"messages": turns})) == [{"messages": turns[:3]}]
    spoken = [{"from": "human", "value": "q"}, {"from": call["role"], "value": call["content"]}]
    assert read_questions(_file(tmp_path, {"conversations": spoken[: 2 if who else 1]})) == [{"prompt": "q"}]


def test_what_is_no_data_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"the file is empty"):
        check(data_of(_file(tmp_path)))
    with pytest.raises(DataError, match="no record in it"):
        check(data_of(_file(tmp_path, b" ")))
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        check(data_of(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"\.xlsx is no known kind of data"):
        check(data_of(_file(tmp_path, b"a,b", name="data.xlsx")))
    with pytest.raises(DataError, match="an Office file"):
        check(data_of(_zip(tmp_path / "data.xlsx", "xl/workbook.xml")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no .* file in this folder"):
        check(data_of(tmp_path / "empty"))


@pytest.mark.parametrize("name", [b"\xb2\xe2.jsonl", b"a\nb.jsonl", b"d\xff/a.jsonl"])
def test_a_path_that_is_no_text_is_refused_before_anything_is_read(tmp_path, name):
    file = tmp_path / os.fsdecode(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(PAIR))
    for source in (file, file.parent, (file,)):
        with pytest.raises(DataError, match="rename"):
            data_files(source)
    wide = tmp_path / "in" / "测\u3000试.jsonl"
    wide.parent.mkdir()
    wide.write_text(json.dumps(PAIR))
    assert data_files(wide) == [wide]


STREAMING = """
import resource, sys
from pathlib import Path
from training.data.sample import Bad
from training.data.readers import LINE_LIMIT, records
from training.data.source import data_of
limit = 200 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
bad = Bad(True)
count = sum(1 for _ in records(data_of(Path(sys.argv[1])), bad))
print(count, bad.shown)
"""


def test_a_file_larger_than_memory_is_read_and_a_huge_line_is_named(tmp_path):
    """300 MB under an address-space limit of 200 MiB, of which one line alone takes 100 MB."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"text": "long " * 20_000}).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(1000):
            file.write(line)
        file.write(b'{"text": "' + b"x" * 100_000_000 + b'"}\n')
        for _ in range(1000):
            file.write(line)
    argv, before = [sys.executable, "-c", STREAMING, str(path)], os.times()
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"2000 ['{path} line 1001: longer than 64 MiB']\n", done.stderr
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 15


def test_the_control_side_checks_data_without_torch_numpy_or_transformers():
    heavy = "{'torch', 'numpy', 'transformers', 'pyarrow', 'huggingface_hub'}"
    names = "training.data.readers, training.data.hub"
    code = f"import sys, {names}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_a_data_set_of_the_hub_is_told_from_a_file_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert on_hub("tatsu-lab/alpaca@main") == HubDataSet("tatsu-lab/alpaca") == on_hub("tatsu-lab/alpaca")
    assert on_hub("openai/gsm8k:main:train@v1.0") == HubDataSet("openai/gsm8k", "main:train", "v1.0")
    assert str(on_hub("openai/gsm8k:main:train@v1.0")) == "openai/gsm8k:main:train@v1.0"
    assert not on_hub("data/train.jsonl")
    assert not on_hub("train")
    (tmp_path / "data" / "mine").mkdir(parents=True)
    assert not on_hub("data/mine")


def test_of_a_data_set_the_training_split_is_taken_and_one_kind_of_file():
    names = [
        "README.md",
        "dataset_infos.json",
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
    ]
    assert chosen_files([*names, "data/test-00000-of-00001.parquet", "train.jsonl"]) == names[2:]
    assert chosen_files(["qa.jsonl", "qa_test.jsonl", ".x/train.jsonl"]) == ["qa.jsonl"]
    assert chosen_files(["training-1.jsonl", "training-2.jsonl", "testing.jsonl"]) == [
        "training-1.jsonl",
        "training-2.jsonl",
    ]
    assert chosen_files(["questions.jsonl", "evals.jsonl"]) == ["questions.jsonl"]
    assert chosen_files(["v1/train.jsonl", "v2/train.jsonl"], choice="v2/train") == ["v2/train.jsonl"]
    assert len(chosen_files(["train/x.jsonl", "train/y.jsonl"], choice="train/*")) == 2


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["default/train/0000.parquet", "default/train/0001.parquet"], "default/train"),
        (["data/000.parquet", "data/001.parquet"], "data"),
        (["sample/000_00000.parquet", "sample/000_00001.parquet", "sample/001_00000.parquet"], "sample"),
        (["part1.jsonl", "part2.jsonl"], "part"),
        (["train1.jsonl", "train2.jsonl", "train10.jsonl"], "train"),
        (["v1/part-1.jsonl", "v1/part-2.jsonl"], "v1/part"),
        (["llama2-00000-of-00002.jsonl", "llama2-00001-of-00002.jsonl"], "llama2"),
        (["qa_v1-00000-of-00002.jsonl", "qa_v1-00001-of-00002.jsonl"], "qa_v1"),
        (["train-1-of-2-0123456789abcdef.jsonl", "train-2-of-2-fedcba9876543210.jsonl"], "train"),
    ],
)
def test_files_whose_names_differ_in_a_number_at_their_end_are_one_part(names, part):
    assert sorted(chosen_files(names)) == sorted(chosen_files([*names, "other.jsonl"], choice=part)) == sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        ["v1/0000.parquet", "v2/0000.parquet"],
        ["qa-v1.jsonl", "qa-v2.jsonl"],
        ["qa_v1-00000-of-00001.jsonl", "qa_v2-00000-of-00001.jsonl"],
        ["llama2-00000-of-00001.jsonl", "llama3-00000-of-00001.jsonl"],
        ["only_test.json", "a.txt"],
        ["data/en/train.jsonl", "data/zh/train.jsonl"],
        ["v1/train-00000-of-00001.parquet", "v2/train-00000-of-00001.parquet"],
        ["sft.jsonl", "rl.jsonl"],
        ["data-train.jsonl.zst", "meta.json"],
        ["train.jsonl.gz", "test.jsonl"],
    ],
)
def test_what_is_not_plainly_the_one_training_split_is_not_taken(names):
    with pytest.raises(DataError):
        chosen_files(names)


SFT = {"split": "train_sft", "path": ["data/train_sft-*"]}
OLD = {"config_name": "old", "data_dir": "old"}
CONFIGS = {
    "one": ([{"config_name": "x", "data_files": [SFT, {"split": "test", "path": "data/**"}]}], "", "data/train_sft-0"),
    "two splits": ([{"data_files": [SFT, {"split": "train_gen", "path": "data/train_gen-0.*"}]}], "", None),
    "a split by its name": ([{"data_files": [SFT, {"split": "gen", "path": "data/*"}]}], "default:gen", "data/train_"),
    "two": ([{"config_name": "a", "data_files": "old/*"}, {"config_name": "b", "data_files": ["data/*"]}], "", None),
    "by its name": ([OLD, {"config_name": "b", "data_files": ["data/*"]}], "old", "old/train"),
    "the default": ([OLD, {"config_name": "b", "default": True, "data_files": [SFT]}], "", "data/train_sft-0"),
    "called default": ([OLD, {"config_name": "default", "data_files": [SFT]}], "", "data/train_sft-0"),
    "unknown": ([OLD], "new", None),
    "no folders below": ([{"data_files": "*.parquet"}], "", None),
    "no configurations": ([{"data_files": 3}], "", None),
    "no pattern": ([{"data_files": "data/**train"}], "", None),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_the_configurations_of_a_data_sets_readme_say_what_is_trained_on(case):
    configs, choice, first = CONFIGS[case]
    names = ["data/train_sft-0.parquet", "data/train_gen-0.parquet", "old/train.parquet", "old/test.parquet"]
    if first is None:
        with pytest.raises(DataError):
            chosen_files(names, configs, choice)
    else:
        assert chosen_files(names, configs, choice) == [name for name in names if name.startswith(first)]


def test_a_folder_with_a_data_sets_readme_is_read_as_it_says(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        _file(tmp_path / name, {"text": name}, name="train.jsonl")
    readme = tmp_path / "README.md"
    readme.write_text("---\nconfigs:\n- config_name: new\n  default: true\n  data_files: new/*\n---\n")
    assert data_files(tmp_path) == [tmp_path / "new" / "train.jsonl"]
    assert "old/train.jsonl" in ignored_files_note(tmp_path)
    readme.write_text("---\nconfigs:\n  new: new/*\n---\n")
    with pytest.raises(DataError):
        data_files(tmp_path)
    for words in ("---\nlicense: mit\n---\n", "---\nconfigs: [\n---\n", "---\ntitle:\tx: y\n---\n", "---\n- a\n---\n"):
        readme.write_text(words)
        assert len(data_files(tmp_path)) == 2
    readme.write_bytes("# 数据\n".encode("gbk"))
    assert len(data_files(tmp_path)) == 2


def test_a_folder_with_a_readme_is_read_in_the_order_that_the_head_reads_its_files_in(tmp_path):
    for name in ("a.jsonl", "z.jsonl", "b-1/x.jsonl", "b/y.jsonl", "test.jsonl"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        _file(tmp_path / "mine", {"text": name}, name=name)
    lists = "data_files:\n  - split: train\n    path: [z.jsonl, a.jsonl, b/*, b-1/*]"
    (tmp_path / "mine" / "README.md").write_text(f"---\nconfigs:\n- config_name: x\n  {lists}\n---\n")
    for place, file in placed(tmp_path / "mine", str(tmp_path / "head")).items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    here, head = (list(records(data_of(tmp_path / name), Bad(False))) for name in ("mine", "head"))
    assert [record.completion for _, record in here] == [record.completion for _, record in head]
    assert len(here) == 4 and data_sha256(tmp_path / "mine") == data_sha256(tmp_path / "head")


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [("train test", "train"), ("train_sft test_sft", "train_sft"), ("all", "all"), ("en fr", ""), ("test", "")],
)
def test_of_a_saved_data_set_the_files_that_its_state_names_are_read(tmp_path, splits, chosen):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits.split()}))
    for split in splits.split():
        (tmp_path / split).mkdir()
        for name in ("data-00000-of-00001.arrow", "data-00001-of-00002.arrow", "cache-0a.arrow"):
            (tmp_path / split / name).write_bytes(b"")
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (tmp_path / split / "state.json").write_text(json.dumps(state))
    if chosen:
        assert data_files(tmp_path) == [tmp_path / chosen / "data-00000-of-00001.arrow"]
    else:
        with pytest.raises(DataError):
            data_files(tmp_path)


def test_a_saved_data_set_without_one_of_its_files_is_refused(tmp_path):
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / names[0]).write_bytes(b"")
    with pytest.raises(DataError, match=names[1]):
        data_files(tmp_path)


def test_every_epoch_sees_every_row_once_in_another_order():
    order = Order(rows=10, seed=3, global_batch=5)
    first, second = order.step(0) + order.step(1), order.step(2) + order.step(3)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert Order(10, 4, 5).step(0) != first[:5]


def test_a_step_crosses_the_end_of_an_epoch_and_needs_no_history():
    order = Order(rows=7, seed=0, global_batch=5)
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


def test_fewer_rows_than_ranks_leave_ranks_with_an_empty_micro_batch():
    assert [micro_batches([5, 6], rank, 3, 2) for rank in range(3)] == [[[5]], [[6]], [[]]]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    for name in ("good.jsonl", "c.xlsx", "说明.txt", ".hidden.txt"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert ignored_files_note(tmp_path) == "ignored: c.xlsx, 说明.txt"
    assert ignored_files_note(tmp_path / "good.jsonl") == "" and [file.name for file in data_files(tmp_path)] == [
        "good.jsonl"
    ]
