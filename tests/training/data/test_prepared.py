"""Prepared data: made once, kept by what they were made from, read back to the token; and batches of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
transformers = pytest.importorskip("transformers", reason="needs the [train] extra")


from tests.support.hub import COMMIT, Hub  # noqa: E402
from training.cost.shape import known_shape, read_outline  # noqa: E402
from training.data import build  # noqa: E402
from training.data.build import Build, cached, content_hash, held_out, link, pad_id  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.encode import Encoder  # noqa: E402
from training.data.prepared import Writer, attention_span, open_prepared  # noqa: E402
from training.data.sample import IGNORED, Bad, DataError, Sample  # noqa: E402
from training.data.shapes import recognised  # noqa: E402
from training.data.source import data_of, data_sha256  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import answered  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.recipe.base import Base  # noqa: E402
from training.recipe.tables import Validation  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
"""Of the tiny model."""
RECORDS = [
    {"messages": [{"role": "user", "content": f"问题 {n}?"}, {"role": "assistant", "content": "answer " * (n % 9 + 1)}]}
    for n in range(60)
]
TOO_LONG = {"messages": [{"role": "user", "content": "q" * 500}, {"role": "assistant", "content": "never reached"}]}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A folder with models/tiny: tokenizer and config, no weights."""
    folder = tmp_path_factory.mktemp("house")
    tokenizer = tiny._tokenizer(["the quick brown fox has an answer to the world?", "问题"])
    tokenizer.save_pretrained(folder / "models" / "tiny")
    (folder / "models" / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def tokenizer(house):
    return transformers.AutoTokenizer.from_pretrained(house / "models" / "tiny")


def _recipe(**overrides):
    changed = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_recipe("tiny", {"max_length": "160", **changed})


def _written(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path


def _made(tokenizer, source, cache, bad=None, **overrides):
    recipe = _recipe(**overrides)
    encoder = Encoder(tokenizer, recipe.max_length, recipe.train_on)
    return cached(data_of(source), encoder, recipe, cache=cache, bad=bad or Bad(False))


def _flat(prepared):
    rows = [prepared.row(number) for number in range(prepared.rows)]
    return sorted((list(map(int, s.ids)), list(map(int, s.labels))) for row in rows for s in row)


@pytest.mark.parametrize("batching", ["packed", "padding-free", "padded"])
def test_what_is_read_back_is_what_the_encoder_made(tokenizer, tmp_path, batching):
    source = _written(tmp_path / "train.jsonl", [*RECORDS, TOO_LONG])
    prepared = open_prepared(_made(tokenizer, source, tmp_path / "cache", batching=batching) / "train")
    encoder = Encoder(tokenizer, 160, "assistant")
    whole = [encoder.samples(encoder.rendered(recognised(record)))[0] for record in RECORDS]
    assert _flat(prepared) == sorted((list(s.ids), list(s.labels)) for s, _ in whole)
    rows = [prepared.row(number) for number in range(prepared.rows)]
    assert prepared.tokens.tolist() == [sum(len(s.ids) for s in row) for row in rows]
    assert prepared.learned.tolist() == [sum(s.learned for s in row) for row in rows]
    report = prepared.report
    assert (report.records, report.samples, report.empty, report.truncated) == (61, 60, 1, 1)
    assert report.tokens == sum(len(s.ids) for s, _ in whole) == prepared.tokens.sum()
    assert report.learned_tokens == sum(s.learned for s, _ in whole) == prepared.learned.sum()
    assert report.longest == max(len(s.ids) for s, _ in whole)
    assert report.rows == prepared.rows == (len(rows) if batching == "packed" else 60)
    assert report.efficiency == pytest.approx(report.tokens / (report.rows * 160), abs=1e-4)
    if batching == "packed":
        assert report.rows < 60 and max(prepared.tokens) <= 160
    assert (report.end_of_turn, report.end_of_turn_id, report.end_of_turn_learned) == ("<|im_end|>", 2, True)


def test_what_attention_spans_is_counted_over_all_samples_not_the_first_rows_which_are_the_longest(
    house, tokenizer, tmp_path
):
    pytest.importorskip("deepspeed", reason="needs the [train] extra")

    source = _written(tmp_path / "train.jsonl", RECORDS)
    made = open_prepared(_made(tokenizer, source, tmp_path / "cache") / "train")
    writer = Writer(tmp_path / "skewed", 160, "packed")
    lengths = [150] * 300 + [10] * 30_000
    for length in lengths:
        writer.add(Sample([7] * length, [7] * length))
    computed = vars(writer).keys() | {"samples", "tokens", "learned_tokens", "rows", "efficiency", "longest"}
    writer.finish({k: v for k, v in vars(made.report).items() if k not in computed | {"attention_span"}})
    prepared = open_prepared(tmp_path / "skewed")
    assert len(prepared.row(0)[0].ids) == 150, "best fit first"
    assert prepared.report.attention_span == pytest.approx(attention_span(prepared.lengths), abs=1e-3)
    assert attention_span(prepared.lengths) == pytest.approx(sum(n * n for n in lengths) / sum(lengths))


def test_the_same_data_are_prepared_once_and_what_differs_is_made_anew(house, tokenizer, tmp_path):
    source, cache = _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache"
    first = _made(tokenizer, source, cache)
    stamp = (first / "train" / "ids.i32").stat().st_mtime_ns
    assert _made(tokenizer, source, cache, steps="7", seed="9") == first
    assert (first / "train" / "ids.i32").stat().st_mtime_ns == stamp
    changes = [{"max_length": "161"}, {"train_on": "all"}, {"batching": "padded"}, {"pad_token": "<|im_start|>"}]
    others = {_made(tokenizer, source, cache, **change) for change in changes}
    others |= {_made(tokenizer, source, cache, validation__fraction="0.2", seed=seed) for seed in "12"}
    others.add(_made(tokenizer, _written(source, RECORDS[1:]), cache))
    assert len(others - {first}) == 7
    assert len(list(cache.iterdir())) == 8  # and nothing half made


def _loaded(model):
    return transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)


def test_the_key_of_prepared_data_covers_what_the_loaded_tokenizer_does(house, tmp_path, monkeypatch):
    source, model = _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "tiny"
    shutil.copytree(house / "models" / "tiny", model)
    found = [content_hash(data_sha256(source), _loaded(model), _recipe())]
    assert found[0] == content_hash(data_sha256(source), _loaded(house / "models" / "tiny"), _recipe())
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    found.append(content_hash(data_sha256(source), _loaded(model), _recipe()))
    tokenizer = _loaded(model)
    for change in ({"eos_token": "<|im_start|>"}, {"pad_token": "<|im_end|>"}):
        tokenizer.add_special_tokens(change)
        found.append(content_hash(data_sha256(source), tokenizer, _recipe()))
    for package in ("transformers", "tokenizers", "jinja2"):
        monkeypatch.setattr(
            build.metadata, "version", lambda name, package=package: "other" if name == package else version(name)
        )
        found.append(content_hash(data_sha256(source), tokenizer, _recipe()))
    assert len(set(found)) == len(found) == 7


def test_two_tokenizer_classes_over_the_same_files_have_other_ids_and_keys(house, tmp_path):
    """The class is named in config.json alone, and rebuilds what the files say in its own way."""
    source, keys, ids = _written(tmp_path / "train.jsonl", RECORDS), [], []
    for kind in ("qwen2", "llama"):
        model = tmp_path / kind
        shutil.copytree(house / "models" / "tiny", model)
        settings = json.loads((model / "tokenizer_config.json").read_text())
        settings.pop("tokenizer_class")
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
        tokenizer = _loaded(model)
        keys.append(content_hash(data_sha256(source), tokenizer, _recipe()))
        ids.append(tokenizer("an answer\n\n  to 12345 e\u0301").input_ids)
    assert ids[0] != ids[1] and keys[0] != keys[1]


@pytest.mark.parametrize("name", ["ids.i32", "learned.u8", "rows.npy", "report.json", "SHA256SUMS"])
def test_a_damaged_entry_is_recognised_and_made_anew(house, tokenizer, tmp_path, name):
    source, cache = _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache"
    entry = _made(tokenizer, source, cache)
    whole = {file.name: file.read_bytes() for file in (entry / "train").iterdir()}
    for damage in ("flipped", "cut", "missing"):
        file = entry / "train" / name
        content = whole[name]
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:] if damage == "flipped" else content[: len(content) // 2])
        if damage == "missing":
            file.unlink()
        with pytest.raises(DataError, match=r"damaged|half made|cannot be read"):
            open_prepared(entry / "train")
        assert _made(tokenizer, source, cache) == entry
        assert {file.name: file.read_bytes() for file in (entry / "train").iterdir()} == whole


def test_the_report_counts_duplicates_and_keeps_the_longest_sample_of_the_whole_data(tokenizer, tmp_path):
    source = _written(tmp_path / "a.jsonl", [*RECORDS, TOO_LONG, *RECORDS[:7]])
    report = open_prepared(_made(tokenizer, source, tmp_path / "cache", validation__fraction="0.2") / "train").report
    whole = _made(tokenizer, source, tmp_path / "cache", max_length=str(report.longest_uncut), train_on="all")
    assert report.duplicates == 7 and report.longest_uncut > report.max_length
    assert open_prepared(whole / "train").report.longest == report.longest_uncut


def test_bad_records_stop_the_preparation_and_leave_nothing_behind(house, tokenizer, tmp_path):
    source, cache = _written(tmp_path / "train.jsonl", [*RECORDS, {"messages": []}]), tmp_path / "cache"
    with pytest.raises(DataError, match="line 61"):
        _made(tokenizer, source, cache)
    assert list(cache.iterdir()) == []
    entry = _made(tokenizer, source, cache, Bad(True))
    assert open_prepared(entry / "train").report.bad == 1
    with pytest.raises(DataError, match="line 61"):  # the entry that skipped it does not speak for a run that does not
        _made(tokenizer, source, cache)


def test_data_without_anything_to_learn_are_refused(house, tokenizer, tmp_path):
    with pytest.raises(DataError, match="no record for train has anything to learn within 160 tokens"):
        _made(tokenizer, _written(tmp_path / "train.jsonl", [TOO_LONG]), tmp_path / "cache")
    source = _written(tmp_path / "a.jsonl", RECORDS[:1])
    with pytest.raises(DataError, match=r"there is 1 alone; --set validation\.fraction=0 keeps none"):
        _made(tokenizer, source, tmp_path / "cache", validation__fraction="0.4")
    assert _made(tokenizer, source, tmp_path / "cache", validation__fraction="0")
    source = _written(tmp_path / "b.jsonl", RECORDS[:2])
    entry = _made(tokenizer, source, tmp_path / "cache", validation__fraction="0.001")
    assert open_prepared(entry / "validation").report.records == 1


def test_validation_takes_records_by_seed_and_number_alone(house, tokenizer, tmp_path):
    source = _written(tmp_path / "train.jsonl", RECORDS)
    entry = _made(tokenizer, source, tmp_path / "cache", validation__fraction="0.2", seed="3")
    training, validation = open_prepared(entry / "train"), open_prepared(entry / "validation")
    chosen = sorted(held_out(60, 3, fifth := Validation(fraction=0.2)))
    encoder = Encoder(tokenizer, 160, "assistant")
    samples = [encoder.samples(encoder.rendered(recognised(record)))[0][0] for record in RECORDS]
    assert _flat(validation) == sorted((list(samples[n].ids), list(samples[n].labels)) for n in chosen)
    assert training.report.records + validation.report.records == 60
    assert len(chosen) == 12 and chosen == sorted(held_out(60, 3, fifth)) != sorted(held_out(60, 4, fifth))


@pytest.mark.parametrize("records", [2, 3, 20, 45, 60, 1000])
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.1, 0.5])
def test_the_held_out_share_is_the_one_asked_for_whatever_the_seed(records, fraction):
    for seed in range(5):
        chosen = held_out(records, seed, Validation(fraction=fraction))
        assert len(chosen) == max(1, round(records * fraction)) and chosen < set(range(records))
    assert held_out(records, 1, Validation()) == held_out(1, 1, Validation(fraction=fraction)) == frozenset()


def test_the_pad_token_is_the_recipes_or_the_tokenizers(tokenizer):
    assert pad_id(tokenizer, _recipe()) == 0
    assert pad_id(tokenizer, _recipe(pad_token="<|im_start|>")) == 1
    with pytest.raises(DataError, match="'<pad>' is no token of tiny"):
        pad_id(tokenizer, _recipe(pad_token="<pad>"))


A, B, C = (
    Sample([1, 2, 3], [IGNORED, 2, 3]),
    Sample([4, 5], [4, 5]),
    Sample([6, 7, 8, 9], [IGNORED, IGNORED, IGNORED, 9]),
)


@pytest.mark.parametrize("batching", ["packed", "padding-free"])
def test_joined_samples_are_isolated_by_positions_and_their_targets_never_cross(batching):
    batch = collate([[A, B], [C]], 0, batching)
    assert batch.attention_mask is None
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    nothing = IGNORED
    assert batch.targets.tolist() == [[2, 3, nothing, 5, nothing, nothing, nothing, 9, nothing]]
    assert (batch.targets != IGNORED).sum() == A.learned + B.learned + C.learned


def test_padded_samples_are_masked_by_length_so_that_a_pad_token_can_be_learned():
    batch = collate([[A], [C]], 9, "padded")
    assert batch.input_ids.tolist() == [[1, 2, 3, 9], [6, 7, 8, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.targets.tolist() == [[2, 3, IGNORED, IGNORED], [IGNORED, IGNORED, 9, IGNORED]]


@pytest.mark.parametrize("batching", ["packed", "padding-free", "padded"])
def test_no_samples_make_a_batch_of_weight_zero(batching):
    batch = collate([], 3, batching)
    assert batch.input_ids.shape == batch.position_ids.shape == batch.targets.shape == (1, 2)
    assert (batch.targets == IGNORED).all()
    assert batch.attention_mask is None or batch.attention_mask.all()


def test_packed_samples_give_the_logits_each_gives_alone_and_a_mask_would_spoil_that():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="sdpa", initializer_range=0.5,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    samples = [Sample(ids := torch.randint(64, (length,)).tolist(), ids) for length in (7, 12, 5, 1, 9)]
    batch = collate([samples[:2], samples[2:]], 0, "packed")
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([sample.ids])).logits[0] for sample in samples])
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits[0]
        ones = torch.ones_like(batch.input_ids)
        masked = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=ones).logits[0]
        padded_batch = collate([[sample] for sample in samples], 0, "padded")
        padded = model(input_ids=padded_batch.input_ids, attention_mask=padded_batch.attention_mask).logits
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()
    assert (padded[padded_batch.attention_mask.bool()] - alone).abs().max() < 1e-5 * alone.abs().max()
    assert (masked - alone).abs().max() > 1e-3


def _run_folder(house, name, recipe, *files):
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    (run / "recipe.toml").write_text(recipe.to_toml())
    for file, content in files:
        (run / "data" / file).write_text(content, "utf-8")
    return run


def _prepare(run):
    argv = [sys.executable, "-m", "training.node.prepare", "--run", str(run)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120)


LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


@pytest.mark.parametrize(
    ("text", "values"), [('{"eos_token_id": [7]}', {"eos_token_id": [7]}), ('{"eos_token_id": 7', {}), ("[7]", {})]
)
def test_generation_settings_that_are_no_json_object_count_as_none(house, tokenizer, text, values):
    run = _run_folder(house, f"generation-{len(text)}", _recipe(), ("train.jsonl", LINES))
    settings = house / "models" / "tiny" / "generation_config.json"
    settings.write_text(text)
    try:
        assert prepare(run, False)["generation"] == values
    finally:
        settings.unlink()


def test_prepare_fills_the_run_folder_and_tells_what_there_is(house):
    run = _run_folder(house, "r1", _recipe(validation__fraction="0.2"), ("train.jsonl", LINES))
    done = _prepare(run)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == json.loads((run / "data" / "report.json").read_text("utf-8"))
    assert answer["report"]["records"] + answer["validation"]["records"] == 60
    assert answer["report"]["shape"] == "messages"
    assert answer["model"] == CONFIG
    assert read_outline(answer["outline"]) == known_shape(Base.parse("built-in:tiny"))
    assert answer["disk_free_gib"] > 0
    prepared = run / "data" / "prepared"
    assert open_prepared(prepared / "train").content_hash == answer["report"]["content_hash"]
    cache = house / "cache" / "prepared" / answer["report"]["content_hash"]
    assert (prepared / "train" / "ids.i32").samefile(cache / "train" / "ids.i32")


@pytest.mark.parametrize("layers", [4, 3], ids=["known", "counted"])
def test_prepare_imports_no_torch_and_makes_the_same_as_with_it(house, layers):
    model = house / "models" / f"layers-{layers}"
    shutil.copytree(house / "models" / "tiny", model)
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    run = _run_folder(house, f"without-{layers}", _recipe(model_dir=model.name), ("train.jsonl", LINES))
    code = (
        "import atexit, sys; from training.node.prepare import main; "
        "atexit.register(lambda: print(sys.modules['torch'])); main()"
    )
    argv = [sys.executable, "-c", code, "--run", str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120)
    answer, torch_module = done.stdout.splitlines()
    assert (done.returncode, done.stderr, torch_module) == (0, "", "None")
    for kept in ("answers", "outlines"):
        shutil.rmtree(house / "cache" / kept, ignore_errors=True)
    with_torch = json.loads(json.dumps(prepare(run, False)))
    assert json.loads(answer) | {"disk_free_gib": 0} == with_torch | {"disk_free_gib": 0}


def test_what_was_answered_before_is_answered_without_a_tokenizer_or_a_model(house, monkeypatch):
    def prepared(name, recipe, lines=LINES, skip_bad=False):
        run = _run_folder(house, name, recipe, ("train.jsonl", lines))
        answer = json.loads(json.dumps(prepare(run, skip_bad) | {"disk_free_gib": 0}))
        return answer, sorted(str(path.relative_to(run)) for path in (run / "data").rglob("*"))

    recipe, bad = _recipe(), LINES + '{"messages": 1}\n'
    first, skipped = prepared("asked-1", recipe), prepared("asked-bad", recipe, bad, skip_bad=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert prepared("asked-2", _recipe(optimizer__lr="0.001", steps="7")) == first
    assert prepared("asked-bad-2", recipe, bad, skip_bad=True) == skipped
    for name, other in {
        "asked-3": (_recipe(max_length="64"), LINES),
        "asked-4": (recipe, LINES.replace("\n", "\n\n", 1)),
    }.items():
        with pytest.raises((DataError, ImportError)):
            prepared(name, *other)
    with pytest.raises((DataError, ImportError)):
        prepared("asked-5", recipe, bad)
    monkeypatch.setattr(answered, "CODE", house / "models")
    with pytest.raises((DataError, ImportError)):
        prepared("asked-6", recipe)


def test_an_answer_whose_data_are_damaged_is_worked_out_again(house):
    lines = LINES.replace("\n", "\n\n", 2)
    first = prepare(_run_folder(house, "whole", _recipe(), ("train.jsonl", lines)), False)
    entry = house / "cache" / "prepared" / first["report"]["content_hash"]
    (entry / "train" / "ids.i32").unlink()
    run = _run_folder(house, "mended", _recipe(), ("train.jsonl", lines))
    again = prepare(run, False)
    assert json.dumps(again | {"disk_free_gib": 0}) == json.dumps(first | {"disk_free_gib": 0})
    assert open_prepared(run / "data" / "prepared" / "train").content_hash == first["report"]["content_hash"]


def test_prepare_of_bad_data_ends_with_exit_code_2_and_the_reason(house):
    run = _run_folder(house, "r2", _recipe(), ("train.jsonl", LINES + '{"messages": 1}\n'))
    done = _prepare(run)
    assert (done.returncode, done.stdout) == (2, "")
    assert "train.jsonl line 61: messages must be a list" in done.stderr and "Traceback" not in done.stderr
    assert not (run / "data" / "prepared").exists()
    answer = prepare(run, skip_bad=True)
    assert answer["report"]["bad"] == 1 and "line 61" in answer["skipped"][0]


@pytest.mark.parametrize("key", ["targets", "modules_to_save"])
def test_a_module_that_the_model_does_not_have_is_refused_before_any_rank_starts(house, key):
    recipe = load_recipe("tiny", {"lora.targets": '["v_proj"]', f"lora.{key}": '["q_proj", "nope"]'})
    done = _prepare(_run_folder(house, f"of-{key}", recipe, ("train.jsonl", LINES)))
    assert done.returncode == 2 and f"lora.{key}: tiny has no module nope" in done.stderr
    assert "Traceback" not in done.stderr


def _small(house, **config):
    """The name of a model folder whose config.json says this."""
    folder = house / "models" / f"small{len(list((house / 'models').iterdir()))}"
    shutil.copytree(house / "models" / "tiny", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder.name


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (
            {"vocab_size": 100},
            {},
            r"the token '.+' of the data has the id \d{3,}, but the embedding of .* ends with 99; its",
        ),
        ({"text_config": {"vocab_size": 100}}, {}, "of the data has the id"),
        (
            {"vocab_size": 2},
            {"pad_token": "<|im_end|>"},
            r"the pad token '<\|im_end\|>' has the id 2, .* ends with 1; --set",
        ),
        (
            {"vocab_size": 2},
            {"lora__trainable_tokens": '["<|im_end|>"]'},
            r"the trainable token '<\|im_end\|>' has the id 2, but .* ends with 1; take it out of lora.tr",
        ),
        ({}, {"lora__trainable_tokens": '["<|no|>"]'}, r"lora.trainable_tokens: .* has no token '<\|no\|>'"),
        ({"vocab_size": 2}, {}, r"the end of turn '<\|im_end\|>' has the id 2, but"),
        (
            {"max_position_embeddings": 128},
            {},
            "max_length 160 is more than the 128 positions of .*; --set max_length=128",
        ),
        ({"n_positions": 128}, {}, "more than the 128 positions"),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 64}},
            {},
            "more than the 128 positions",
        ),
    ],
)
def test_what_the_model_has_no_row_or_position_for_is_refused_when_data_are_prepared(house, config, changed, said):
    name = _small(house, **config)
    run = _run_folder(house, f"limits-{name}", _recipe(**changed), ("train.jsonl", LINES))
    toml = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(toml.replace('"tiny"', f'"{name}"'))
    with pytest.raises(DataError, match=said):
        prepare(run, skip_bad=False)
    assert not (run / "data" / "prepared").exists() and not (run / "data" / "report.json").exists()


def test_ids_beyond_the_embedding_are_refused_of_data_that_were_prepared_for_another_model(house):
    """One tokenizer, two models: what is in the cache is held against the model of this run."""
    for number, (rows, refused) in enumerate(((5000, False), (100, True), (5000, False))):
        name = _small(house, vocab_size=rows, max_position_embeddings=160)
        run = _run_folder(house, f"rows{number}", _recipe(), ("train.jsonl", LINES))
        (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace('"tiny"', f'"{name}"'))
        done = _prepare(run) if refused else None
        if done:
            assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
            assert "but the embedding of" in done.stderr
        else:
            assert prepare(run, skip_bad=False)["report"]["records"] == 60


def test_a_record_whose_tool_call_the_template_drops_is_named_with_its_line_and_can_be_left_out(house):
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    lines = json.dumps({"messages": turns}) + "\n" + LINES
    run = _run_folder(house, "dropped", _recipe(), ("train.jsonl", lines))
    with pytest.raises(DataError, match=r"train\.jsonl line 1: .* leaves out a tool call of turn 2"):
        prepare(run, skip_bad=False)
    answer = prepare(run, skip_bad=True)
    assert (answer["report"]["bad"], answer["report"]["records"]) == (1, 60)


HUB = """
import sys
from pathlib import Path
from training.data.sample import DataError
from training.data.readers import check
from training.node.prepare import raw_data
for run in sys.argv[2:]:
    try:
        print(check(raw_data(Path(run) / "data", Path(sys.argv[1]))).records)
    except DataError as error:
        print(error)
"""


def test_a_data_set_of_the_hub_is_downloaded_once_and_only_its_training_split(house, tmp_path):
    files = {"README.md": b"#", "qa/train-0.jsonl": LINES.encode(), "qa/test.jsonl": b"not looked at"}
    names = [
        "acme/qa@main\n",
        "acme/qa",
        "acme/nowhere",
        "acme/qa@v9",
        "no name",
        "acme/empty",
        "acme/gated",
        "acme/bad",
        "acme/two",
        "acme/two:long",
        "acme/two:short:train@main",
    ]
    runs = [_run_folder(tmp_path, str(n), _recipe(), ("train.hub", name)) for n, name in enumerate(names)]
    two = {"long/train.jsonl": LINES.encode(), "short/train.jsonl": LINES.splitlines()[0].encode()}
    sets = {"two": two, "qa": files, "empty": {"README.md": b"#"}, "gated": files, "bad": {"../../train.jsonl": b""}}
    with Hub({f"datasets/acme/{name}": there for name, there in sets.items()}) as hub:
        hub.gated_files.add("datasets/acme/gated")
        hub.cards["datasets/acme/two"] = {
            "configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("long", "short")]
        }
        argv = [sys.executable, "-c", HUB, str(tmp_path / "cache"), *map(str, runs)]
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
        assert (hub.authorised, hub.leaked) == ([], [])
        env["SPOTUNE_TOKEN_HOST"] = "127.0.0.1"
        opened = subprocess.run(
            [*argv[:4], str(runs[6])], capture_output=True, text=True, cwd=ROOT, env=env, timeout=60
        )
        assert opened.stdout == "60\n" and hub.authorised and not hub.leaked
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:2] == ["60", "60"]
    assert said[2].startswith(f"data set acme/nowhere at main cannot be downloaded from {hub.url}: ")
    assert said[3].startswith("data set acme/qa at v9 cannot be downloaded from ")
    assert said[4].startswith("'no name' is no data set of the Hub")
    assert said[5].startswith("data set acme/empty: no ")
    assert "the hub asks for a token (401); HF_TOKEN is sent to huggingface.co alone" in said[6]
    assert said[7].endswith("'../../train.jsonl' is no name of a file inside its folder")
    assert "long:train, short:train" in said[8]
    assert said[9:] == ["60", "1"]  # one commit, and neither choice reads the other's files
    fetched = [path for method, path, _ in hub.requests if method == "GET" and path.startswith("/datasets/acme/qa/")]
    assert len(fetched) == 1 and fetched[0].endswith("/qa/train-0.jsonl")
    assert len(list((tmp_path / "cache").glob(f"acme--qa*/{COMMIT}/qa/train-0.jsonl"))) == 1


def test_prepared_data_are_copied_where_links_are_impossible(house, tokenizer, tmp_path, monkeypatch):
    entry = _made(tokenizer, _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    link(entry, tmp_path / "run")
    assert _flat(open_prepared(tmp_path / "run" / "train")) == _flat(open_prepared(entry / "train"))


def test_a_run_folder_that_was_removed_meanwhile_is_not_made_again(house, tokenizer, tmp_path):
    entry = _made(tokenizer, _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache")
    with pytest.raises(FileNotFoundError):
        link(entry, tmp_path / "runs" / "given-up" / "data" / "prepared")
    assert not (tmp_path / "runs").exists()


def _aged(entry, days):
    entry.mkdir(parents=True, exist_ok=True)
    os.utime(entry, (time.time() - days * 86400,) * 2)
    return entry


def test_what_nobody_used_for_a_month_goes_and_what_is_used_stays(house, tokenizer, tmp_path):
    source, cache = _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache"
    entry = _made(tokenizer, source, cache)
    gone = subprocess.Popen(["true"])
    gone.wait()
    kept = [_aged(cache / ("a" * 64), 29), _aged(cache / f".{'b' * 64}.{os.getppid()}", 1)]
    _aged(cache / ("c" * 64), 31), _aged(cache / f".{'d' * 64}.{gone.pid}", 1)
    _aged(entry, 40)
    began = time.time()
    assert _made(tokenizer, source, cache) == entry
    assert sorted(cache.iterdir()) == sorted([entry, *kept])
    assert entry.stat().st_mtime > began - 1, "used now: files have a coarser clock"
    assert open_prepared(entry / "train").rows


def test_two_that_prepare_the_same_data_at_once_both_get_them(house, tokenizer, tmp_path, monkeypatch):
    source, cache = _written(tmp_path / "train.jsonl", RECORDS), tmp_path / "cache"
    run, others = Build.run, []

    def run_and_be_overtaken(build, source, content):
        made = run(build, source, content)
        if not others:
            others.append(cache / content)
            shutil.copytree(build.folder, cache / content)
        return made

    monkeypatch.setattr(Build, "run", run_and_be_overtaken)
    assert _made(tokenizer, source, cache) == others[0]
    assert list(cache.iterdir()) == others and open_prepared(others[0] / "train").rows


def test_what_python_keeps_of_the_code_is_no_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "node" / "__pycache__").mkdir(parents=True)
    (tmp_path / "node" / "__pycache__" / "finetune.cpython-311.pyc.140643819593072").touch()
    (tmp_path / "node" / "finetune.py").touch()
    monkeypatch.setattr(answered, "CODE", tmp_path)
    assert list(map(str, answered._code())) == ["node/finetune.py"]
