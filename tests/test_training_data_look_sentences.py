"""What is wrong with records, in Chinese: the sentences are those that the readers of data make."""

from __future__ import annotations

import json

import pytest

from training.data.bad_records import Bad
from training.data.json_text import json_value
from training.data.look.content import Look, remarks
from training.data.look.naming import named
from training.data.look.repeats import Repeats
from training.data.look.sentences import LONGEST, bad_record, fault
from training.data.look.survey import FileSurvey, Survey, survey
from training.data.sample import BadRecord
from training.data.shapes import recognised
from training.words import ENGLISH, Words

CHINESE = Words("zh")
HI = {"role": "user", "content": "hi"}


def why(record):
    """What is wrong with it: a record, or the bytes of one."""
    if isinstance(record, bytes):
        return str(json_value(record))
    with pytest.raises(BadRecord) as caught:
        recognised(record)
    return str(caught.value)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b'{"text": ', "不是 JSON：第 10 个字符处缺少值"),
        (b'{"a": 1, "a": 2}', "不是 JSON：同一个对象里有两个键 'a'"),
        (b'{"a": NaN}', "不是 JSON：不能写 NaN"),
        ("你好".encode("gbk"), "不是 UTF-8：从第 1 个字节起"),
        ([1], "应当是一个对象，却是列表"),
        ({"messages": [HI, {"role": "assistant", "content": " "}]}, "助手的每一轮都是空的"),
        ({"messages": [HI]}, "没有助手的轮次，没有可学的内容"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "没有用户的轮次，没有可回答的内容"),
        (
            {"messages": [HI, {"role": "bot", "content": "a"}]},
            "第 2 轮的 role 是 'bot'；可用的是 system, user, assistant, tool",
        ),
        ({"messages": [HI, {"role": "assistant"}]}, "第 2 轮要有 role，以及是文本的 content，却是空值（null）"),
        ({"messages": []}, "messages 必须是列表，至少有一轮"),
        ({"instruction": "a"}, "有 instruction，但缺少 output，或者它是空的"),
        ({"instruction": "a", "output": ""}, "output 是空的"),
        ({"instruction": "a", "output": 3}, "output 必须是文本，却是数字"),
        ({"text": "a\0"}, "text 中有 NUL 字符"),
        ({"chosen": "a"}, "有 chosen，但没有 rejected；偏好对两者都要有"),
        (
            {"问": "a", "答": "b"},
            "没有任何一种格式所需的键（messages, conversations, prompt 和 completion, instruction 和 output, "
            "chosen 和 rejected 或 text）；它的键：问, 答",
        ),
    ],
)
def test_what_is_wrong_with_a_record_is_said_in_chinese(record, said):
    assert fault(why(record), CHINESE) == said


def test_what_a_template_hides_is_named_in_chinese():
    hidden = (
        "the model's chat template leaves out the arguments of a tool call of turn 2, so it cannot be learned; take it "
        "out, or take a model whose template shows it"
    )
    assert fault(hidden, CHINESE).startswith("模型的聊天模板不显示第 2 轮的工具调用的参数，学不到")
    assert fault(hidden, ENGLISH) == hidden


@pytest.mark.parametrize("file", ["客服.jsonl", "a (1): line 3.jsonl", "/data/a b.csv"])
def test_a_bad_record_stands_at_its_place_in_chinese_and_in_english_as_it_was(file):
    bad = Bad(skip=True, most=9)
    bad.add(f"{file} line 18", "every assistant turn is empty")
    for line in (3, 9, 12, 20):
        bad.add(f"{file} line {line}", f"not UTF-8 at byte {line}")
    bad.add(f"{file} line 4", "nested too deeply")
    bad.add("b.jsonl line 5", "nested too deeply")
    bad.add(f"{file} line 7", "something new")
    assert [bad_record(line, [file, "b.jsonl"], ENGLISH) for line in bad.shown] == bad.shown
    assert [bad_record(line, [file, "b.jsonl"], CHINESE) for line in bad.shown] == [
        f"{file} 第 18 行：助手的每一轮都是空的",
        f"4 条记录，其中第一条不是 UTF-8：从第 3 个字节起（{file} 第 3、9、12 行等）",
        f"2 条记录：嵌套太深（{file} 第 4 行、b.jsonl 第 5 行）",
        f"{file} 第 7 行：something new",
    ]


def test_what_is_not_known_or_too_long_to_be_taken_apart_stays():
    long = f"a.jsonl line 1: turn 1 has the role {'x' * LONGEST!r}; system, user, assistant, tool are known"
    for sentence in ("", "odd", long):
        assert bad_record(sentence, ["a.jsonl"], CHINESE) == sentence


def test_a_look_in_chinese_has_its_bad_records_in_chinese(tmp_path):
    file = tmp_path / "客服.jsonl"
    empty = {"messages": [HI, {"role": "assistant", "content": ""}]}
    file.write_text("\n".join([json.dumps(empty), "{", '{"text": "a"}']), encoding="utf-8")
    found = survey(file, lambda *_: None)
    look = named(Look(found, found.bad, found.bad_shown, False), None, CHINESE)
    assert look.bad_shown[0] == f"{file} 第 1 行：助手的每一轮都是空的"
    assert look.bad_shown[1] == f"{file} 第 2 行：不是 JSON：第 3 个字符处应当是双引号括起来的键"


@pytest.mark.parametrize(
    ("say", "leaked", "said"),
    [
        (
            ENGLISH,
            0,
            "of 9 held-out records none in the training data too; the same question with another answer: 1",
        ),
        (CHINESE, 0, "9 条验证记录中没有一条与训练数据重复；有 1 条问题相同、回答不同"),
        (
            CHINESE,
            2,
            "9 条验证记录中有 2 条也在训练数据里，另有 1 条问题相同、回答不同：在学过的内容上测损失没有意义",
        ),
    ],
)
def test_nothing_is_called_leaked_where_only_questions_are_the_same(say, leaked, said):
    look = Look(Survey((), 0, ()), 0, (), False, repeats=Repeats(0, 0, (), 9, leaked, 1, ()))
    assert list(remarks(look, say)) == [said]


def test_why_nothing_can_be_trained_is_said_in_chinese():
    files = (FileSurvey("a.jsonl", 9, {"text": 3, "alpaca": 1}, 0),)
    look = Look(Survey(files, 0, ()), 0, (), False, refused=Survey(files, 0, ()).refused)
    assert next(remarks(look, CHINESE)) == (
        "一次训练的所有记录必须是同一种格式，这里有 3 条 text, 1 条 alpaca：请去掉其他的，"
        "或改写成同一种（每种格式的样例见 docs/data.zh.md）"
    )
    assert next(remarks(look, ENGLISH)) == look.refused
