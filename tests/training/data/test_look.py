"""What `fab data` shows is what training learns: held against the prepared data themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from tests.support import programs
from tests.support.chat_templates import FORGETFUL, MARKED, OPENS_THOUGHTS, TOOLS
from tests.support.hub import Hub
from tests.support.no_torch import fab_without_torch
from tests.support.paper_weights import write_shapes
from training.data.build import cached
from training.data.encode import Encoder
from training.data.look.content import LOOK, look_from, remarks, surveyed
from training.data.look.shown import MOST_TOKENS, pieces_of
from training.data.look.take import LookWish, look_into
from training.data.prepared import open_prepared
from training.data.sample import IGNORED, Bad, DataError, Sample
from training.data.shapes import recognised
from training.data.source import data_of
from training.data.survey import survey
from training.laptop import data_view
from training.laptop.data_view import Question
from training.models import tiny
from training.models.names import load_recipe
from training.text.files import sha256_of

pytestmark = pytest.mark.torch


def _turns(*texts):
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


RECORDS = [
    *(_turns(f"问题 {n}?", f"答案 {n} " * (n % 7 + 1)) for n in range(20)),
    _turns("q", "<think>\nhm\n</think>\n\none", "and?", "<think>\nso\n</think>\n\ntwo <|im_end|> 🦊"),
    _turns("once more?", "您好，世界", "再来", "second answer"),
    _turns("问题 3?", "答案 3 " * 4),
]


@pytest.fixture(scope="module")
def base():
    return tiny._tokenizer(["the quick brown fox says hello to the world", "您好，世界。你好再来 问题 答案"])


@pytest.fixture
def tokenizer(base):
    yield base
    base.chat_template = tiny.CHAT_TEMPLATE


def _written(path, records=RECORDS):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def _recipe(**overrides):
    return load_recipe("tiny", {"max_length": "160", **{key.replace("__", "."): v for key, v in overrides.items()}})


def _looked(tokenizer, source, show=3, skip_bad=False, config=None, **overrides):
    found = survey(data_of(source), lambda *_: None)
    recipe = _recipe(**overrides)
    tell = lambda *_: None  # noqa: E731
    return look_into(data_of(source), found, recipe, tokenizer, config or {}, wish=LookWish(show, skip_bad, tell))


def _prepared(tokenizer, source, cache, **overrides):
    recipe = _recipe(**overrides)
    encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on, recipe.template_args)
    return cached(data_of(source), encoder, recipe, cache=cache, bad=Bad(True))


def _learned_texts(tokenizer, prepared):
    """The learned stretches of every sample, from what the ranks get: its labels."""
    found = []
    for number in range(prepared.rows):
        for sample in prepared.row(number):
            runs, before = [], IGNORED
            for label in [IGNORED, *map(int, sample.labels[1:])]:
                if label != IGNORED:
                    runs = [*runs, [label]] if before == IGNORED else [*runs[:-1], [*runs[-1], label]]
                before = label
            found.append([tokenizer.decode(run) for run in runs])
    return sorted(found)


def test_special_tokens_in_the_words_are_counted_and_said(tokenizer, tmp_path):
    source = tmp_path / "a.jsonl"
    marked = [_turns("<|im_start|>user\nq<|im_end|>", "a"), _turns("q", "a<|im_end|>")]
    source.write_text("".join(json.dumps(record) + "\n" for record in [*RECORDS, *marked]))
    look = _looked(tokenizer, source)
    # one of RECORDS has a token in its middle
    assert (look.train.marked, tuple(look.train.marks)) == (
        2,
        ("<|im_end|>", "<|im_start|>"),
    )
    assert any("2 records with special tokens in the words" in line for line in remarks(look))


def test_thoughts_without_an_end_or_an_answer_are_counted_and_said(tokenizer, tmp_path):
    cut = [_turns("q", f"<think>\nhm {n}") for n in range(2)]
    alone = [_turns("q", f"<think>\nhm {n}\n</think>\n\n") for n in range(3)]
    call = {"tool_calls": [{"function": {"name": "look"}}], "content": "<think>so</think>", "role": "assistant"}
    speaks = [_turns("q", "<think>hm</think>a", "<think> is", "so"), {"messages": [*_turns("q")["messages"], call]}]
    tokenizer.chat_template = TOOLS
    look = _looked(tokenizer, _written(tmp_path / "a.jsonl", [*cut, *alone, *speaks]))
    assert (look.train.cut_thoughts, look.train.only_thoughts, look.train.unknown) == (2, 3, 0)
    assert len({*remarks(look)}) == len({*remarks(replace(look, train=replace(look.train, cut_thoughts=0)))}) + 1


def test_letters_that_the_vocabulary_lacks_are_counted_and_said(tmp_path):
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "yes": 3}, unk_token="<unk>")
    inner = Tokenizer(words)
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"pad_token": "<|im_start|>"})
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    known = [_turns("who?", "yes yes") for _ in range(3)]
    look = _looked(tokenizer, _written(tmp_path / "a.jsonl", [*known, _turns("yes", "yes 雨"), _turns("yes", "雨")]))
    assert look.train.unknown == 2
    assert len({*remarks(look)}) == len({*remarks(replace(look, train=replace(look.train, unknown=0)))}) + 1


def _shown_texts(look):
    found = []
    for sample in look.samples:
        runs, before = [], False
        for piece in sample.pieces:
            if piece.learned:
                runs = [*runs, piece.text] if not before else [*runs[:-1], runs[-1] + piece.text]
            before = piece.learned
        found.append(runs)
    return sorted(found)


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, MARKED, FORGETFUL, OPENS_THOUGHTS])
@pytest.mark.parametrize("overrides", [{}, {"train_on": "all"}, {"max_length": "64"}, {"batching": "padded"}])
def test_the_learned_tokens_shown_are_those_of_the_prepared_labels(tokenizer, tmp_path, template, overrides):
    tokenizer.chat_template = template
    source = _written(tmp_path / "train.jsonl")
    look = _looked(tokenizer, source, show=len(RECORDS), skip_bad=True, **overrides)
    prepared = open_prepared(_prepared(tokenizer, source, tmp_path / "cache", **overrides) / "train")
    assert _shown_texts(look) == _learned_texts(tokenizer, prepared) != []
    assert sum(sample.learned for sample in look.samples) == prepared.report.learned_tokens == look.train.learned_tokens
    assert sum(piece.tokens for sample in look.samples for piece in sample.pieces) == prepared.report.tokens
    assert (look.train.rows, look.train.efficiency) == (prepared.report.rows, prepared.report.efficiency)
    assert look.steps == _recipe(**overrides).total_steps(prepared.rows)


def test_the_pieces_of_a_sample_are_its_text_and_special_tokens_are_told_from_text_that_looks_like_them(tokenizer):
    encoder = Encoder(tokenizer, 1000, "assistant")
    (rendered,) = encoder.rendered(recognised(_turns("a", "您好🦊", "<|im_end", "b")))
    ((sample, _),) = encoder.samples([rendered])
    pieces = pieces_of(tokenizer, sample)
    assert "".join(piece.text for piece in pieces) == rendered.text
    assert [piece.text for piece in pieces if piece.special] == ["<|im_start|>", "<|im_end|>"] * 5
    assert [piece.text for piece in pieces if piece.learned] == ["您好🦊", "<|im_end|>", "b", "<|im_end|>"]
    assert [piece.special for piece in pieces if "<|im_end\n" in piece.text + "\n"] == [False]


def test_a_tokenizer_that_drops_blanks_at_the_beginning_loses_none_between_pieces():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "<s>": 3}, unk_token="<s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    pieces = pieces_of(tokenizer, Sample([0, 1, 2], [IGNORED, 1, IGNORED]))
    assert [piece.text for piece in pieces] == ["one", " two", " three"]


def test_a_very_long_sample_is_shown_in_part_and_the_rest_counted(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl", [_turns("q", "x " * 6000)])
    (sample,) = _looked(tokenizer, source, max_length="10000").samples
    assert sample.left_out == sample.tokens - MOST_TOKENS == sample.tokens - sum(p.tokens for p in sample.pieces) > 0


def test_samples_are_spread_over_the_data_and_named_by_their_place(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl")
    look = _looked(tokenizer, source, show=3)
    assert [sample.where for sample in look.samples] == [f"{source} line {n}" for n in (1, 8, 16)]
    assert _looked(tokenizer, source, show=0).samples == ()


def test_what_the_template_drops_is_told_with_file_and_line_and_the_rest_is_looked_at(tokenizer, tmp_path):
    tokenizer.chat_template = FORGETFUL.replace(" and not loop.last", "")
    look = _looked(tokenizer, source := _written(tmp_path / "a.jsonl"))
    (line,) = look.bad_shown
    assert line.startswith(f"{source} line 21: ") and "the thoughts of turn 2;" in line
    assert (look.bad, look.usable, look.train.records) == (1, False, len(RECORDS) - 1)
    assert "1 bad record: fix them, or skip them with --skip-bad" in remarks(look)
    skipping = _looked(tokenizer, source, skip_bad=True)
    assert skipping.usable and "1 bad record: skipped (--skip-bad)" in remarks(skipping)


def test_a_file_in_gbk_beside_a_good_one_hides_nothing_of_the_good_one(tokenizer, tmp_path):
    _written(tmp_path / "good.jsonl")
    (tmp_path / "old.jsonl").write_bytes((tmp_path / "good.jsonl").read_text("utf-8").replace("🦊", "").encode("gbk"))
    look = _looked(tokenizer, tmp_path)
    assert "old.jsonl: not UTF-8; it looks like " in look.refused and "GB18030" in look.refused
    assert not look.usable and look.train.records == len(RECORDS) and len(look.samples) == 3


def test_lengths_repeats_and_leaks_are_those_of_the_whole_data(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl", [*RECORDS, *RECORDS])
    look = _looked(tokenizer, source, max_length="64", validation__fraction="0.4")
    assert look.repeats.duplicates == len(RECORDS) + 1
    assert look.validation.records == look.repeats.held_out > 0
    encoder = Encoder(tokenizer, 10_000, "assistant")
    whole = _looked(tokenizer, source, max_length="10000").lengths
    assert encoder.max_length == whole.max_length and whole.cut_samples == 0
    assert look.lengths.longest == whole.longest and look.lengths.median == whole.median
    assert look.lengths.cut_tokens > 0 and f"--set max_length={whole.longest} would cut none" in "".join(remarks(look))


def test_what_a_run_would_refuse_is_said_and_the_survey_stays(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl")
    look = _looked(tokenizer, source, config={"max_position_embeddings": 100})
    assert look.refused.startswith("max_length 160 is more than the 100 positions of")
    assert look.survey.records == len(RECORDS) and not look.usable
    tokenizer.chat_template = None
    assert "has no chat template" in _looked(tokenizer, source).refused


def test_what_was_seen_in_the_files_lies_with_the_prepared_data(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl")
    entry = _prepared(tokenizer, source, tmp_path / "cache")
    kept = look_from(json.loads((entry / LOOK).read_text("utf-8")))
    (file,) = kept.survey.files
    assert file.sha256 == sha256_of(source) and kept.usable
    assert (replace(file, sha256=""),) == _looked(tokenizer, source, skip_bad=True).survey.files
    with pytest.raises(ValueError, match="survey"):
        look_from({})


def test_without_a_model_the_survey_is_all_there_is(tmp_path):
    look = surveyed(survey(data_of(_written(tmp_path / "a.jsonl")), lambda *_: None), skip_bad=False)
    assert look.usable and look.train is None and list(remarks(look)) == []


def test_on_a_laptop_without_torch_one_command_shows_what_is_learned_and_what_to_mend(tmp_path):
    turns = [{"from": "human", "value": "怎样煮米饭？"}, {"from": "gpt", "value": "先淘米，[bold]再加水\x1b[31m。"}]
    good = json.dumps({"conversations": turns}, ensure_ascii=False) + "\n"
    data = tmp_path / "data"
    data.mkdir()
    (data / "chat.jsonl").write_text(good + good[:-20] + "\n", "utf-8")
    (data / "old.jsonl").write_bytes(good.encode("gbk") * 3)
    done = fab_without_torch(tmp_path, "data", "--data", data, "--model", "tiny", "--here")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "⟦先淘米，[bold]再加水\\x1b[31m。<|im_end|>⟧" in done.stdout
    assert f"{data}/chat.jsonl line 2: not JSON" in done.stdout and "--skip-bad" in done.stdout
    assert f"iconv -f GB18030 -t UTF-8 {data}/old.jsonl > {data}/old.jsonl.utf8 && mv" in done.stdout
    assert "\x1b" not in done.stdout, "no colours in a pipe"


FEW = "its recipe is derived without counting its layers: 3 epochs, but 2 from 10 billion parameters on"


@pytest.mark.parametrize("here", [["--here"], []], ids=["here", "where it is"])
def test_a_model_in_a_folder_is_looked_at_without_torch_and_uncounted(tokenizer, tmp_path, here):
    model = tmp_path / "my-model"
    tokenizer.save_pretrained(model)
    config = {"model_type": "qwen3", "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(config))
    write_shapes(model / "model.safetensors", {"model.norm.weight": [4]})
    source = _written(tmp_path / "a.jsonl")
    done = fab_without_torch(tmp_path, "data", source, "--model", "./my-model", "--skip-bad", *here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"./my-model: {FEW}" in done.stderr and "my-model: " in done.stdout and " tokens, " in done.stdout
    assert "next: fab train --model ./my-model" in done.stdout
    assert not (tmp_path / ".cache" / "spotune" / "outlines").exists()
    said = fab_without_torch(
        tmp_path, "data", "--data", source, "--model", "./my-model", "--skip-bad", "--set", "epochs=1", *here
    )
    assert FEW not in said.stderr and said.returncode == 0
    (model / "config.json").write_text(json.dumps(config | {"model_type": "laguna"}))
    refused = fab_without_torch(tmp_path, "data", source, "--model", "./my-model", *here)
    assert refused.returncode == 2 and "a laguna is not trained" in refused.stderr, "as a start refuses it"


def test_a_model_of_the_hub_is_looked_up_for_a_look_and_its_tokenizer_is_named(tokenizer, tmp_path):
    config = {"model_type": "qwen3", "max_position_embeddings": 512}
    files = {"config.json": json.dumps(config).encode(), "tokenizer_config.json": b"{}"}
    source = _written(tmp_path / "a.jsonl")
    with Hub({"acme/Small": files}) as hub:
        done = fab_without_torch(
            tmp_path, "data", "--data", source, "--model", "acme/Small", "--here", HF_ENDPOINT=hub.url
        )
    assert f"acme/Small: {FEW}" in done.stderr and "torch" not in done.stderr
    assert "the tokenizer of acme/Small is not on this machine" in done.stdout.replace("\n", " ")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "without its chat template"])
def test_a_tokenizer_in_the_hubs_cache_is_used_where_it_is_whole(tokenizer, tmp_path, monkeypatch, whole):
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / ("a" * 40)
    tokenizer.save_pretrained(snapshot)
    (snapshot / "config.json").write_text(json.dumps({"max_position_embeddings": 40960, "vocab_size": 151936}))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    if not whole:
        (snapshot / "chat_template.jinja").unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    asked = Question((str(_written(tmp_path / "a.jsonl")),), "qwen3-8b", load_recipe("qwen3-8b"), here=True)
    look = data_view.look(asked, datetime.now(UTC), lambda *_: None)
    assert look.usable == whole and (look.train is not None) == whole
    assert whole or "the tokenizer of Qwen/Qwen3-8B is not on this machine" in look.refused


def test_a_folder_that_is_a_model_is_looked_at_with_its_own_tokenizer(tokenizer, tmp_path):
    model = tmp_path / "my-model"
    tokenizer.save_pretrained(model)
    recipe = _recipe(base_model=f"folder:{model}", model_dir="my-model")
    source = _written(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        data_view.look(Question((str(source),), str(model), recipe), datetime.now(UTC), lambda *_: None)
    (model / "config.json").write_text('{"vocab_size": 4}')
    look = data_view.look(Question((str(source),), str(model), recipe), datetime.now(UTC), lambda *_: None)
    assert "but the embedding of" in look.refused and "ends with 3" in look.refused


def test_the_command_ends_with_2_where_something_is_to_be_mended_and_0_where_nothing_is(tmp_path):
    (tmp_path / "fabfile.py").write_text("from training.laptop.tasks import namespace\n")
    (tmp_path / "a.jsonl").write_text('{"text": "once"}\n{"tex\n')
    env = {**os.environ, "PYTHONPATH": programs.PATH}
    ended = []
    for more in ([], ["--skip-bad"]):
        argv = [sys.executable, "-m", "fabric", "data", "--data", "a.jsonl", *more]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        ended.append(done.returncode)
        assert "a.jsonl line 2: not JSON" in done.stdout and "Traceback" not in done.stderr
    assert ended == [2, 0]
