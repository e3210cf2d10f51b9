"""What `fab data` finds in files without a model: CSV and TSV, encodings and what converts them, bad records."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from training.data import json_text
from training.data.look.content import remarks, surveyed
from training.data.readers import TOGETHER, check, records
from training.data.sample import Bad, DataError
from training.data.source import data_of
from training.data.splits import chosen_files
from training.data.survey import TELL_EVERY, survey
from training.text.problems import foreign_sample

CHINESE = "你好，请问今天上海的天气怎么样？我想知道明天是否适合出门跑步。"
TAIWANESE = "你好，請問今天臺北的天氣怎麼樣？我想知道明天是否適合出門跑步。"
JAPANESE = "こんにちは、今日の東京の天気はどうですか。明日は走れますか。"
RUSSIAN = "Привет, какая сегодня погода в Москве? Спасибо большое за ответ."
FRENCH = "Bonjour, quelle est la météo ? Ça été très agréable, où êtes-vous né ?"


def _lines(text, count=6):
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": f"{text}!"}]
    return (json.dumps({"conversations": turns}, ensure_ascii=False) + "\n") * count


def _file(folder, content, name="data.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _read(path, skip=True):
    bad = Bad(skip=skip)
    return [(where.removeprefix(f"{path} "), record) for where, record in records(data_of(path), bad)], bad.shown


def _survey(path):
    return survey(data_of(path), lambda *_: None)


@pytest.mark.parametrize(
    ("text", "codec", "name"),
    [
        (CHINESE, "gbk", "GB18030"),
        (f"{CHINESE}㐂𠀀", "gb18030", "GB18030"),
        (TAIWANESE, "big5", "BIG5"),
        (JAPANESE, "shift_jis", "CP932"),
        (JAPANESE, "euc_jp", "EUC-JP"),
        (RUSSIAN, "cp1251", "CP1251"),
        (FRENCH, "cp1252", "CP1252"),
        ("질문 0? 대답, 안녕하세요 반갑습니다", "cp949", "CP949"),
        ("西湖在哪裡,在杭州", "big5", "BIG5"),
        (CHINESE, "utf-16", "UTF-16"),
        (CHINESE, "utf-16-le", "UTF-16LE"),
        (CHINESE, "utf-16-be", "UTF-16BE"),
        (CHINESE, "utf-32", "UTF-32"),
        (CHINESE, "utf-32-le", "UTF-32LE"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_the_command_that_really_converts_it(tmp_path, text, codec, name):
    path = _file(tmp_path, _lines(text).encode(codec), "my 数据.jsonl")
    with pytest.raises(DataError) as refusal:
        check(data_of(path), skip_bad=True)
    said, _, command = str(refusal.value).partition("reads well: ")
    assert said.startswith(f"{path}: not UTF-8; it looks like {name}")
    subprocess.run(command, shell=True, check=True)
    assert path.read_text("utf-8-sig") == _lines(text)
    assert path.with_name(f"my 数据.jsonl.{name}").read_bytes() == _lines(text).encode(codec)
    assert check(data_of(path)).records == check(data_of(path.parent)).records == 6


def test_chinese_words_that_are_utf8_by_chance_do_not_hide_gbk(tmp_path):
    turns = [{"from": "human", "value": "谢谢！"}, {"from": "gpt", "value": "不客气，有需要再找我。"}]
    talks = json.dumps([{"conversations": turns}] * 10, ensure_ascii=False, indent=2)
    path = _file(tmp_path, talks.encode("gbk"), "对话gbk.json")
    with pytest.raises(DataError, match="iconv -f GB18030"):
        check(data_of(path))
    shop = "instruction,output\n" + "在吗,在的\n包邮吗,包邮\n谢谢,谢谢\n" * 15
    with pytest.raises(DataError, match="iconv -f GB18030"):
        check(data_of(_file(tmp_path, shop.encode("gbk"), "shop.csv")), skip_bad=True)


@pytest.mark.parametrize("broken", ["你好，请问今天的天气怎么样".encode("gbk"), "café".encode("latin1"), b"\xff\xfe"])
@pytest.mark.parametrize("text", ["谢谢", "你好，请问", "café", "不"])
def test_short_utf8_texts_with_one_broken_line_are_still_utf8(tmp_path, text, broken):
    lines = f'{{"text": "{text}"}}\n'.encode() * 3
    assert foreign_sample(_file(tmp_path, lines + b'{"text": "' + broken + b'"}\n')) is None


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig"])
def test_utf8_is_read_with_and_without_a_mark(tmp_path, codec):
    assert foreign_sample(path := _file(tmp_path, _lines(CHINESE).encode(codec))) is None
    assert check(data_of(path)).records == 6


def test_a_line_in_gbk_among_utf8_is_a_bad_record_and_not_the_end_of_the_file(tmp_path):
    lines = _lines(CHINESE, 3).encode() + _lines(CHINESE, 1).encode("gbk") + _lines(TAIWANESE, 2).encode()
    found, bad = _read(path := _file(tmp_path, lines))
    assert [where for where, _ in found] == ["line 1", "line 2", "line 3", "line 5", "line 6"]
    assert bad == [f"{path} line 4: not UTF-8 at byte 48"]


def test_ascii_until_late_in_the_file_does_not_hide_its_encoding(tmp_path):
    path = _file(tmp_path, _lines("plain", 3000).encode() + _lines(CHINESE).encode("gbk"))
    with pytest.raises(DataError, match="it looks like GB18030"):
        check(data_of(path))


def test_bytes_that_are_no_known_encoding_are_said_to_be_none(tmp_path):
    path = _file(tmp_path, b'{"text": "\xff\xfe\x81\x00\x81\x81\xff\xff\x90\x90\xff\x81\xff\xff"}\n' * 3)
    with pytest.raises(DataError, match="its encoding is not recognised"):
        check(data_of(path))


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t"), ("a.CSV", ",")])
def test_rows_under_a_header_are_records(tmp_path, name, mark):
    rows = (
        ["instruction", "input", "output"],
        ['"say ""hi"""', "", "hi"],
        ['"two\nlines"', "x", "y"],
        ["ok", "", "fine"],
    )
    for start, ends in (("", "\n"), ("\ufeff", "\r\n")):
        path = _file(tmp_path, start + ends.join(mark.join(row) for row in rows) + ends, name)
        found, bad = _read(path)
        assert [(where, record.prompt, record.completion) for where, record in found] == [
            ("line 2", 'say "hi"\n', "hi"),
            ("line 3", "two\nlines\nx\n", "y"),
            ("line 5", "ok\n", "fine"),
        ]
        assert not bad


def test_a_csv_may_hold_conversations_as_json_and_texts_that_look_like_some(tmp_path):
    turns = json.dumps([{"role": "user", "content": "你"}, {"role": "assistant", "content": "好"}], ensure_ascii=False)
    quoted = turns.replace('"', '""')
    ((_, found),), _ = _read(_file(tmp_path, f'messages\n"{quoted}"\n', "a.csv"))
    assert [turn["content"] for turn in found.turns] == ["你", "好"]
    ((_, found),), _ = _read(_file(tmp_path, "prompt,completion\n[INST] x,[1]\n", "a.csv"))
    assert (found.prompt, found.completion) == ("[INST] x", "[1]")


def test_turns_as_json_in_a_field_that_may_hold_words_are_turns_and_other_json_is_learned_as_it_is(tmp_path):
    def line(*fields):
        return ",".join('"' + json.dumps(one, ensure_ascii=False).replace('"', '""') + '"' for one in fields)

    asked, told = [{"role": "user", "content": "几点开门?"}], [{"role": "assistant", "content": "九点"}]
    ((_, found),), _ = _read(_file(tmp_path, f"prompt,completion\n{line(asked, told)}\n", "a.csv"))
    assert [(turn["role"], turn["content"]) for turn in found.turns] == [("user", "几点开门?"), ("assistant", "九点")]
    worse = [{"role": "assistant", "content": "不知道"}]
    ((_, found),), _ = _read(_file(tmp_path, f"prompt,chosen,rejected\n{line(asked, told, worse)}\n", "b.csv"))
    assert (found.turns[-1]["content"], found.rejected.turns[-1]["content"]) == ("九点", "不知道")
    listed = [{"role": "admin", "name": "anna"}]
    ((_, found),), _ = _read(_file(tmp_path, f"prompt,completion\nlist them,{line(listed)}\n", "c.csv"))
    assert json.loads(found.completion) == listed
    _, (bad,) = _read(_file(tmp_path, f"prompt,completion\nwhen?,{line(told)}\n", "d.csv"))
    assert "must both be text or both be lists of turns" in bad


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"short\n", "line 3: 1 field, but line 1 names 2 columns"),
        (b"a,b,c\n", "line 3: 3 fields, but line 1 names 2 columns"),
        (b'"a"b,c\n', "line 3: not CSV: ',' expected after"),
        (b"a\xff,b\n", "line 3: not UTF-8 in the column prompt"),
        (b"a,\n", "line 3: prompt without completion, which is missing or empty"),
        (b",\n", "line 3: none of messages"),
        (b"a,x\0y\n", "line 3: completion holds a NUL character"),
    ],
)
def test_a_bad_row_is_named_by_its_line_and_the_next_is_read(tmp_path, row, said):
    found, bad = _read(path := _file(tmp_path, b"prompt,completion\n1,2\n" + row + b"3,4\n", "a.csv"))
    assert [record.prompt for _, record in found] == ["1", "3"]
    assert len(bad) == 1 and bad[0].startswith(f"{path} {said}")


def test_a_quote_that_never_ends_is_named_by_the_line_it_begins_in(tmp_path):
    found, (bad,) = _read(path := _file(tmp_path, 'prompt,completion\n1,2\n"3,4\n5,6\n', "a.csv"))
    assert len(found) == 1 and bad == f"{path} line 3: not CSV: unexpected end of data"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("question,answer", "spotune needs the columns of messages, conversations, prompt and completion"),
        ("Question,Reply", "its header is Question, Reply"),
        ("prompt,completion,prompt", "names the column 'prompt' twice"),
        ('"prompt"x,completion', "line 1, which should name the columns, cannot be read"),
    ],
)
def test_a_header_that_names_no_shape_is_refused_with_what_is_possible(tmp_path, header, said):
    with pytest.raises(DataError) as refusal:
        check(data_of(_file(tmp_path, f"{header}\n1,2,3\n", "a.csv")))
    assert said in str(refusal.value)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_columns_are_separated_by_the_sign_that_makes_known_ones_of_the_first_line(tmp_path, name, sign):
    ((_, record),), bad = _read(_file(tmp_path, f'"prompt"{sign}completion\n"一{sign} 三"{sign}"say ""hi"""\n', name))
    assert (record.prompt, record.completion, bad) == (f"一{sign} 三", 'say "hi"', [])


def test_a_csv_from_excel_in_gbk_is_named(tmp_path):
    path = _file(tmp_path, f"instruction,output\r\n{CHINESE},好的\r\n".encode("gbk"), "a.csv")
    with pytest.raises(DataError, match=r"it looks like GB18030.*iconv -f GB18030 -t UTF-8 .*a\.csv > .*a\.csv\.utf8"):
        check(data_of(path))


def test_a_data_set_of_the_hub_that_is_csv_is_taken_where_nothing_else_is_there():
    assert chosen_files(["train.csv", "test.csv", "README.md"]) == ["train.csv"]
    assert chosen_files(["train.csv", "train.jsonl"]) == ["train.jsonl"]


def test_a_survey_counts_shapes_by_file_and_goes_on_behind_what_it_cannot_read(tmp_path):
    _file(tmp_path, _lines(CHINESE, 3) + '{"conversations": [{"from": "robot", "value": "x"}]}\n{"tex', "a.jsonl")
    _file(tmp_path, _lines(CHINESE).encode("gbk"), "b.jsonl")
    _file(tmp_path, '{"text": "one"}\n' + _lines("x", 1), "c.jsonl")
    _file(tmp_path, b"", "d.csv")
    found = _survey(tmp_path)
    assert [(Path(f.name).name, f.shapes, f.bad) for f in found.files] == [
        ("a.jsonl", {"sharegpt": 3}, 2),
        ("b.jsonl", {}, 0),
        ("c.jsonl", {"text": 1, "sharegpt": 1}, 0),
        ("d.csv", {}, 0),
    ]
    assert (found.records, found.bad, found.shapes) == (5, 2, {"sharegpt": 4, "text": 1})
    assert [line.partition(": ")[0] for line in found.bad_shown] == [f"{tmp_path}/a.jsonl line {n}" for n in (4, 5)]
    assert "it looks like GB18030" in found.refused and "d.csv: the file is empty" in found.refused
    assert found.readable == {str(tmp_path / "a.jsonl")}


def test_of_many_files_that_cannot_be_read_ten_are_told(tmp_path):
    for number in range(13):
        _file(tmp_path, b"", f"{number:02}.jsonl")
    said = _survey(tmp_path).refused.splitlines()
    assert len(said) == 11 and said[0].endswith("00.jsonl: the file is empty") and said[-1] == "and 3 more files"


def test_two_shapes_are_refused_with_their_counts(tmp_path):
    found = _survey(_file(tmp_path, _lines("x", 3) + '{"text": "one"}\n'))
    assert found.refused.startswith("all records of a run have one shape; these are 3 of sharegpt, 1 of text")


def test_two_shapes_are_said_beside_files_that_cannot_be_read(tmp_path):
    _file(tmp_path, _lines("x", 3), "a.jsonl")
    _file(tmp_path, '{"text": "one"}\n', "b.jsonl")
    _file(tmp_path, b"", "c.jsonl")
    first, second = _survey(tmp_path).refused.splitlines()
    assert first.endswith("c.jsonl: the file is empty") and "3 of sharegpt, 1 of text" in second


def test_keys_that_are_not_read_are_named_once(tmp_path):
    found = _survey(_file(tmp_path, '{"text": "one", "id": 1}\n{"text": "two", "source": "web"}\n'))
    assert found.ignored == ("id", "source")
    assert list(remarks(surveyed(found, False))) == ["keys of records that are not read: id, source"]


def test_nothing_but_bad_records_is_refused(tmp_path):
    found = _survey(_file(tmp_path, '{"no": 1}\n' * 30))
    assert found.refused == "no record can be used; 30 are bad"
    assert (found.bad, found.bad_more) == (30, 0)
    (line,) = found.bad_shown
    assert line.startswith("30 records: ") and line.endswith("lines 1, 2, 3, ...)")


def test_progress_is_told_while_files_are_read(tmp_path):
    told = []
    _file(tmp_path, _lines("x", 2500), "a.jsonl")
    _file(tmp_path, _lines("x", 2500), "b.jsonl")
    survey(data_of(tmp_path), lambda what, records: told.append((what, records)))
    counts = [0, *(count for _, count in told)]
    assert {what for what, _ in told} == {"reading"} and counts[-1] == 5000
    assert all(0 <= after - before < TELL_EVERY + TOGETHER for before, after in pairwise(counts))


ARRAYS = {
    "plain": [{"text": "one"}, {"text": "two"}],
    "nested": [{"text": 'a, ] [ {"\\', "more": [[1, [2]], {"k": None}]}, {"text": "你好🦊" * 50}],
    "values": [1, 23, -4.5e10, "x", None, True, [], {}],
    "empty": [],
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_an_array_is_read_value_by_value_wherever_its_pieces_end(tmp_path, monkeypatch, name, indent, piece):
    monkeypatch.setattr(json_text, "PIECE", piece)
    path = _file(tmp_path, "\ufeff " + json.dumps(ARRAYS[name], ensure_ascii=False, indent=indent) + " \n", "a.json")
    assert list(json_text.values(path)) == ARRAYS[name]


@pytest.mark.parametrize("piece", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[{"a": 1} {"b": 2}]', "not JSON: Expecting ',' delimiter at character 11"),
        (b'[{"a": 1},]', "not JSON: Expecting value at character 11"),
        (b'[{"a": 1}', "not JSON: Expecting ',' delimiter at character 10"),
        (b'[{"a": "x', "not JSON: Unterminated string starting at character 8"),
        (b"[1] 2", "not JSON: Extra data at character 5"),
        (b"[1, NaN]", "not JSON: NaN is no JSON value"),
        (b'[{"a": 1, "a": 2}]', "not JSON: the key 'a' stands twice in one object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_array_is_refused_with_what_is_wrong_and_where(tmp_path, monkeypatch, content, said, piece):
    monkeypatch.setattr(json_text, "PIECE", piece)
    with pytest.raises(DataError) as refusal:
        list(json_text.values(_file(tmp_path, content, "a.json")))
    assert str(refusal.value) == said


PRETTY = [{"text": "one"}, {"text": "二", "more": {"a": [1]}}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
@pytest.mark.parametrize(
    "content",
    [
        json.dumps(PRETTY),
        json.dumps(PRETTY, indent=2),
        "\ufeff\n" + "\n".join(json.dumps(one, indent=2) for one in PRETTY),
        "".join(json.dumps(one) + "\n" for one in PRETTY),
    ],
)
def test_arrays_and_records_over_several_lines_are_read_whatever_the_file_is_called(tmp_path, content, name):
    assert [record.completion for _, record in _read(_file(tmp_path, content, name), skip=False)[0]] == ["one", "二"]


def test_bytes_that_are_not_utf8_spoil_their_own_record_of_an_array_alone(tmp_path):
    found, bad = _read(
        path := _file(tmp_path, b'[{"text": "a"}, {"text": "\xff"}, {"text": "' + "你好".encode() + b'"}]')
    )
    assert [record.completion for _, record in found] == ["a", "你好"]
    assert bad[0].startswith(f"{path} record 2: text holds") and "UTF-8" in bad[0]


def test_an_array_is_never_held_whole(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as stream:
        stream.write("[" + ",\n".join(json.dumps({"text": f"{n} " + "x" * 5000}) for n in range(4000)) + "]")
    assert path.stat().st_size > 20e6
    tracemalloc.start()
    assert sum(1 for _ in json_text.values(path)) == 4000
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()
