"""Numbers of base and tuned model: right, of two really separate models, and for Chinese answers too."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import tiny_adapter
from training.node.adapter.evaluate import WordScores, score

ROOT = Path(__file__).parents[4]


def test_chinese_is_compared_character_by_character_and_latin_by_words():
    assert WordScores().tokenize("GPU 显存不足，重启 node-1！") == [
        "gpu",
        "显",
        "存",
        "不",
        "足",
        "重",
        "启",
        "node",
        "1",
    ]
    assert WordScores().tokenize("模型A100很快ok") == ["模", "型", "a100", "很", "快", "ok"]


def test_rouge_l_and_exact_match_mean_the_same_for_both_scripts():
    pytest.importorskip("rouge_score", reason="needs the [train] extra")
    assert score(["今天天气很好"], ["今天天气很好"]) == score(["It is fine"], ["it is  fine"])
    # 4 of 5 characters in order, 4 of 6 wanted: F = 2 * 4/5 * 4/6 / (4/5 + 4/6)
    found = score(["今天天气坏"], ["今天天气很好"])
    assert found.exact_match == 0 and found.rouge_l == pytest.approx(8 / 11)
    assert score(["完全不同"], ["今日晴"]).rouge_l == 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    pytest.importorskip("torch", reason="needs the [train] extra")
    from training.data.questions import Sampling
    from training.node.adapter.decoding import Voice
    from training.node.adapter.evaluate import Asked, evaluate, held_out_at

    folder = tmp_path_factory.mktemp("measured")
    base = tiny_adapter.write_variant(tiny_adapter.write_base(folder / "bf16"), folder / "base")
    adapter = tiny_adapter.write_adapter(base, folder / "adapter")
    data = folder / "held_out.jsonl"
    records = [{"prompt": f"{n} 加一？", "completion": f"是 {n + 1}。" * (n + 1)} for n in range(4)]
    data.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    voice = Voice.of(base)
    asked = Asked(held_out_at(data, voice.tokenizer, 256).samples, voice, 2, Sampling(8))
    found = SimpleNamespace(base=base, adapter=adapter, data=data, asked=asked)
    found.both = evaluate(base, adapter, asked)
    return found


def loss_by_transformers(model, samples) -> float:
    """Token-weighted over all samples, by transformers' own loss."""
    import torch

    total = tokens = 0
    for sample in samples:
        ids, labels = torch.tensor([list(sample.ids)]), torch.tensor([list(sample.labels)])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * sample.learned
        tokens += sample.learned
    return total / tokens


@pytest.mark.torch
def test_the_losses_are_transformers_own_of_each_model_loaded_by_itself(measured):
    from peft import PeftModel

    base = loss_by_transformers(tiny_adapter.load(measured.base), measured.asked.samples)
    tuned_model = PeftModel.from_pretrained(tiny_adapter.load(measured.base), measured.adapter).eval()
    tuned = loss_by_transformers(tuned_model, measured.asked.samples)
    assert measured.both["base"]["loss"] == pytest.approx(base, rel=1e-5)
    assert measured.both["tuned"]["loss"] == pytest.approx(tuned, rel=1e-5)
    assert abs(base - tuned) > 0.01  # or the two lines above would say nothing
    assert measured.both["base"]["perplexity"] == pytest.approx(math.exp(base), rel=1e-4)
    assert measured.both["base"]["tokens"] == sum(sample.learned for sample in measured.asked.samples)


@pytest.mark.torch
def test_the_bases_numbers_are_the_same_after_the_tuned_one_was_measured(measured):
    from training.node.adapter.evaluate import measure

    measure(measured.base, measured.adapter, measured.asked)
    again = measure(measured.base, None, measured.asked)
    assert again.loss == measured.both["base"]["loss"] and again.rouge_l == measured.both["base"]["rouge_l"]


@pytest.mark.torch
def test_an_answer_is_asked_for_with_all_before_it_and_compared_with_the_records_own(measured):
    from training.node.adapter.evaluate import exchange_of

    exchange = exchange_of(measured.asked.samples[1])
    tokenizer = measured.asked.voice.tokenizer
    assert tokenizer.decode(exchange.prompt).endswith("1 加一？<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(exchange.reference) == "是 2。是 2。<|im_end|>"
    assert measured.both["base"]["answers"] == 2
    kept = measured.both["tuned"]["examples"]
    middle = exchange_of(measured.asked.samples[len(measured.asked.samples) // 2])
    assert kept[1]["wanted"] == tokenizer.decode(middle.reference, skip_special_tokens=True)
    assert kept[1]["asked"] == "system: You are a helpful assistant.\n\nuser: 2 加一？"


@pytest.mark.torch
def test_answers_that_max_length_cuts_are_counted(measured):
    from training.node.adapter.evaluate import held_out_at

    lengths = [len(sample.ids) for sample in measured.asked.samples]
    found = held_out_at(measured.data, measured.asked.voice.tokenizer, max(lengths) - 1)
    assert found.cut == lengths.count(max(lengths)) < len(found.samples)
    assert held_out_at(measured.data, measured.asked.voice.tokenizer, max(lengths)).cut == 0


@pytest.mark.torch
def test_data_that_were_sent_are_called_as_their_user_does(measured, tmp_path):
    from training.data.sample import DataError
    from training.laptop.adapter.ask import data_to_measure_on
    from training.node.adapter.evaluate import held_out_at

    (tmp_path / "数据").mkdir()
    (tmp_path / "数据" / "a.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a " * 300}))
    sent = data_to_measure_on([str(tmp_path / "数据")])
    for place, file in sent.files.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(file if isinstance(file, str) else file.read_text())
    with pytest.raises(DataError) as refusal:
        held_out_at(tmp_path / sent.place, measured.asked.voice.tokenizer, 4)
    assert str(refusal.value).partition(":")[0] == "数据/a.jsonl"


def test_the_same_bytes_under_other_names_are_sent_to_a_place_of_their_own(tmp_path):
    from training.laptop.adapter.ask import data_to_measure_on

    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"prompt": "q", "completion": "a"}\n')
    sent = [data_to_measure_on([str(tmp_path / f"{name}.jsonl") for name in two]).place for two in ("ab", "ac")]
    assert sent[0] != sent[1]


@pytest.mark.torch
def test_what_was_trained_on_is_counted_and_nothing_is_said_where_that_is_not_known(measured, tmp_path: Path):
    from training.data.prepared import Writer
    from training.node.adapter.evaluate import HeldOut, learned_before

    given = HeldOut(measured.asked.samples)
    assert learned_before(given, tmp_path / "train") is None
    writer = Writer(tmp_path / "train", 256, "packed")
    for sample in (*given.samples[1:3], given.samples[1]):
        writer.add(sample)
    texts = dict.fromkeys(("content_hash", "shape", "end_of_turn"), "")
    flags = dict.fromkeys(("template", "end_of_turn_learned"), False)
    numbers = dict.fromkeys(("bad", "end_of_turn_id", "pad_id", "eos_id"), 0)
    writer.finish({**texts, **flags, **numbers, "settings": {}})
    assert learned_before(given, tmp_path / "train") == 2


@pytest.mark.torch
def test_the_command_writes_its_numbers_and_ends_a_mistake_with_code_2(measured, tmp_path: Path):
    argv = [
        sys.executable,
        "-m",
        "training.node.adapter.evaluate",
        "--model",
        measured.base,
        "--adapter",
        measured.adapter,
    ]
    argv += ["--data", measured.data, "--answers", "0", "--out", tmp_path / "evaluation.json"]
    done = subprocess.run([str(a) for a in argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["tuned"]["loss"] == pytest.approx(measured.both["tuned"]["loss"], rel=1e-6)
    assert found["tuned"]["exact_match"] is None


@pytest.mark.torch
@pytest.mark.parametrize(
    ("count", "most", "kept"), [(10, 5, [0, 2, 4, 6, 8]), (3, 5, [0, 1, 2]), (0, 5, []), (9, 0, [])]
)
def test_what_is_kept_is_spread_over_all(count, most, kept):
    from training.node.adapter.evaluate import spread

    assert spread(range(count), most) == kept


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is\n2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "special", "question"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], "system: Be brief. user: What is\n2+2?"),
        (f"{CHATML}<think>\n\n</think>\n\n", ["<|im_start|>", "<|im_end|>"], "system: Be brief. user: What is\n2+2?"),
        (f"{CHATML}<think>\n", ["<|im_start|>", "<|im_end|>"], "system: Be brief. user: What is\n2+2?"),
        (
            "[gMASK]<sop><|user|>\n几点？<|assistant|>\n<think></think>",
            ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>"],
            "几点？",
        ),
        (
            "<|start|>user<|end|>\n\nq<|eot|><|start|>assistant<|end|>\n\na<|eot|><|start|>user<|end|>\n\nand?<|eot|>"
            "<|start|>assistant<|end|>\n\n",
            ["<|start|>", "<|end|>", "<|eot|>"],
            "user: q assistant: a user: and?",
        ),
        ("<s>[INST] hello [/INST]", ["<s>", "[INST]", "[/INST]"], "hello"),
        ("<bos>user<sep>human<sep>assistant", ["<bos>", "<sep>"], "user human assistant"),
        ("Question: why?", [], "Question: why?"),
    ],
)
def test_of_a_prompt_the_whole_conversation_is_told(text, special, question):
    from training.node.adapter.decoding import Voice

    class Tokenizer:
        all_special_tokens = special

        def decode(self, ids, skip_special_tokens):
            plain = re.sub("|".join(map(re.escape, special)) or "(?!)", " ", text)
            return plain if skip_special_tokens else text

    said = Voice(Tokenizer(), None, frozenset(), 9).conversation([])
    assert " ".join(said.split()) == " ".join(question.split())
