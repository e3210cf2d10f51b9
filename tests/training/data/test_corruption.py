"""2,000 damaged data files: each is refused in a sentence, or what is read of it is exactly what stands in it.

The judge is the plainest reader there is: json.loads of the line, pyarrow's own table of the Parquet file. Every
text of an accepted record must be a text of what that reads, in its place.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from pathlib import Path

import pytest

from training.data.readers import DataError, records
from training.data.sample import Bad
from training.data.source import data_of

SHAPES = {
    "messages": {
        "messages": [
            {"role": "system", "content": "你是助手"},
            {"role": "user", "content": "上海天气？"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": "上海"}'}}]},
            {"role": "tool", "content": "雨"},
            {"role": "assistant", "content": '下雨 \\ "quoted"\n'},
        ]
    },
    "alpaca": {"instruction": "翻译成中文", "input": "good morning", "output": "早上好"},
    "sharegpt": {"conversations": [{"from": "human", "value": "你好 friend"}, {"from": "gpt", "value": "您好 😀"}]},
    "prompt/completion": {"prompt": "two plus two is", "completion": " four（四）"},
    "text": {"text": "从前有座山，山里有座庙。"},
}


OTHER_VALUES = [None, 0, -1.5, True, "", " ", "text", [], {}, [[]], [{}], {"a": 1}, ["a"], "\0", "\ud800"]
OTHER_KEYS = ["messages", "text", "prompt", "role", "value", "from", "xyz", "weight", "tools"]


def _varied(value, number):
    """The same record with a number in every text, so that no two records read alike."""
    if isinstance(value, dict):
        kept = {"role", "from", "name", "arguments"}
        return {key: inner if key in kept else _varied(inner, number) for key, inner in value.items()}
    if isinstance(value, list):
        return [_varied(inner, number) for inner in value]
    return f"{value} {number}"


def _places(value, found=None):
    """Every dictionary and list within a record."""
    found = [] if found is None else found
    if isinstance(value, dict | list):
        found.append(value)
        for inner in value.values() if isinstance(value, dict) else value:
            _places(inner, found)
    return found


def _dropped(draw, record):
    place = draw.choice([p for p in _places(record) if p])
    key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    del place[key]


def _retyped(draw, record):
    place = draw.choice([p for p in _places(record) if p])
    key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
    place[key] = draw.choice(
        [None, 0, -1.5, True, "", " ", "text", [], {}, [[]], [{}], {"a": 1}, ["a"], "\0", "\ud800"]
    )


def _renamed(draw, record):
    place = draw.choice([p for p in _places(record) if isinstance(p, dict) and p])
    key = draw.choice(list(place))
    place[draw.choice(["messages", "text", "prompt", "role", "value", "from", "xyz", "weight", "tools"])] = place.pop(
        key
    )


def _flipped(draw, content):
    content = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def _inserted(draw, content):
    piece = draw.choice([b"\0", b"\r\n", b"\n", b"\r", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80", b"NaN", b"\\ud800"])
    place = draw.randrange(len(content) + 1)
    return content[:place] + piece + content[place:]


def _cut(draw, content):
    start, end = sorted(draw.sample(range(len(content) + 1), 2))
    return content[:start] if draw.random() < 0.3 else content[:start] + content[end:]


def _windows(draw, content):
    return (b"\xef\xbb\xbf" if draw.random() < 0.5 else b"") + content.replace(b"\n", b"\r\n")


def _doubled(draw, content):
    start, end = sorted(draw.sample(range(len(content) + 1), 2))
    return content[:end] + content[start:end] + content[end:]


def _huge(draw, content):
    return content.replace(b"0", draw.choice([b"9" * 6000, b"[" * 6000, b"x" * 1_100_000]), 1)


IN_RECORDS = (_dropped, _retyped, _renamed)
IN_BYTES = (_flipped, _flipped, _inserted, _cut, _windows, _doubled, _huge)


def _damaged(draw, shape, kind):
    """The bytes of a file of that kind, damaged in one way."""
    rows = [_varied(SHAPES[shape], number) for number in range(draw.choice([1, 4]))]
    change = draw.choice([*IN_RECORDS, *IN_BYTES])
    if change in IN_RECORDS:
        change(draw, draw.choice(rows))
    if kind == "parquet":
        content = _parquet(rows)
    elif kind == "json":
        content = json.dumps(rows, ensure_ascii=draw.random() < 0.3).encode("utf-8", "surrogatepass")
    else:
        lines = (json.dumps(row, ensure_ascii=draw.random() < 0.3) + "\n" for row in rows)
        content = "".join(lines).encode("utf-8", "surrogatepass")
    return change(draw, content) if change in IN_BYTES else content


def _parquet(rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = io.BytesIO()
    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, TypeError, UnicodeEncodeError):  # no table can hold such a mix of types
        table = pyarrow.Table.from_pylist([{"column": 1}])
    with contextlib.suppress(pyarrow.ArrowException):
        parquet.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


def _oracle(path):
    """Every value in the file by its place, as the plainest reader of its kind gives them; BAD is not in it."""
    content = path.read_bytes()
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return {f"row {n}": value for n, value in enumerate(parquet.read_table(io.BytesIO(content)).to_pylist(), 1)}
    content = content.removeprefix(b"\xef\xbb\xbf")
    found = {f"record {n}": value for n, value in enumerate(_elements(content.decode(errors="replace")), 1)}
    for number, line in enumerate(content.split(b"\n"), 1):
        with contextlib.suppress(ValueError, RecursionError):  # what is not UTF-8 among them
            found[f"line {number}"] = json.loads(line.decode())
    return found


def _elements(text):
    """Values one after another, of an array its own, as far as they are whole."""
    place = text.index("[") + 1 if text.lstrip().startswith("[") else 0
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            value, place = json.JSONDecoder().raw_decode(text, re.compile(r"\s*").match(text, place).end())
            yield value
            if comma := re.compile(r"\s*,").match(text, place):
                place = comma.end()


def _texts_of(raw):
    """(speaker, text) in order, of a raw value, written down anew from the five shapes' own definitions."""
    for key in ("messages", "conversations"):
        if raw.get(key) is not None:
            names = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
            said = [("system", raw["system"])] if raw.get("system") else []
            turns = [{name: value for name, value in turn.items() if value is not None} for turn in raw[key]]
            told = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in turns]
            return said + [(names.get(who, who), _content_of(who, text)) for who, text in told]
    if raw.get("prompt") is not None and raw.get("completion") is not None:
        return [("user", raw["prompt"]), ("assistant", raw["completion"])]
    if raw.get("instruction") is not None and raw.get("output") is not None:
        asked = [part for part in (raw["instruction"], raw.get("input")) if part]
        return [("user", "\n".join(asked)), ("assistant", raw["output"])]
    return [("text", raw["text"])]


def _content_of(who, value):
    """The text of a turn; any value of a tool is text as JSON."""
    if who in {"tool", "observation"} and not isinstance(value, str | None):
        return json.dumps(value, ensure_ascii=False)
    return "" if who == "function_call" else value or ""


def _calls_of(raw):
    turns = raw.get("messages") or []
    calls = [call.get("function", call) for turn in turns for call in turn.get("tool_calls") or []]
    given = [(call["name"], call.get("arguments") or "{}") for call in calls]
    return [(name, json.loads(arguments)) for name, arguments in given if isinstance(arguments, str)]


def _look_at(path, seen):
    bad = Bad(skip=True)
    accepted = []
    try:
        for where, record in records(data_of(path), bad):
            accepted.append((where.removeprefix(f"{path} "), record))
    except DataError as error:
        assert str(path) in str(error) and len(str(error)) < 2000
        seen["refused"] += 1
    seen["bad"] += bad.count
    assert all(len(sentence) < 2000 for sentence in bad.shown)
    if not accepted:
        return
    truth = _oracle(path)
    for where, record in accepted:
        seen["accepted"] += 1
        raw = truth[where]
        said = [(turn["role"], turn["content"]) for turn in record.turns] or [("text", record.completion)]
        assert said == _texts_of(raw), where
        assert all("\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text) for _, text in said)
        calls = [call["function"] for turn in record.turns for call in turn.get("tool_calls", ())]
        assert [(call["name"], call["arguments"]) for call in calls] == _calls_of(raw) or record.shape == "sharegpt"


@pytest.mark.parametrize("seed", range(10))
def test_of_200_damaged_files_none_ends_in_a_traceback_or_reads_as_what_it_does_not_say(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("training.data.readers.LINE_LIMIT", 2**20)  # a huge line need not take 64 MiB here
    pytest.importorskip("pyarrow")
    draw = random.Random(seed)
    seen = {"refused": 0, "bad": 0, "accepted": 0}
    for number in range(200):
        shape, kind = draw.choice(list(SHAPES)), draw.choice(["jsonl", "jsonl", "json", "parquet"])
        path = Path(tmp_path / f"{number}.{kind}")
        path.write_bytes(_damaged(draw, shape, kind))
        _look_at(path, seen)
    assert min(seen.values()) >= 20, seen  # the damage does all three things
