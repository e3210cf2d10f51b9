"""Answers of base and tuned model: transformers' own words, two really separate ones, and no process left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import tiny_adapter
from training.data.questions import Sampling, from_prompts, read_questions
from training.laptop.adapter import ask
from training.text.problems import AdapterError

ROOT = Path(__file__).parents[4]
QUESTIONS = ["What does shutil.rmtree do?", "What does os.walk do?"]


def test_a_file_of_prompts_and_messages_is_read_and_its_reference_answers_left_out(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    turns = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    path.write_text(json.dumps([{"prompt": "a"}, {"messages": parts}], indent=1))
    assert read_questions(path) == [{"prompt": "a"}, {"prompt": "b"}]
    path.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    assert read_questions(path) == [{"prompt": "a"}, {"prompt": "你好"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("谢谢", r'line 1: not JSON: .*; a line is as in \{"prompt": "\.\.\."\}'),
        ('{"x": 1}', "prompt and completion"),
        ('{"prompt": 3}', "prompt .* number"),
        ('{"text": "t"}', "nothing"),
        ('{"messages": [{"role": "user", "content": " "}]}', "nothing"),
        ("", "nothing"),
    ],
)
def test_a_file_that_asks_nothing_sensible_is_refused_with_its_line(line: str, words: str, tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(AdapterError, match=words):
        read_questions(path)


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_p": 0.0}, {"max_new_tokens": 0}])
def test_sampling_that_cannot_be_is_refused_with_its_value(values: dict):
    with pytest.raises(AdapterError, match="--"):
        Sampling(**values)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A base, an adapter, and both behind one Pair."""
    pytest.importorskip("torch", reason="needs the [train] extra")
    from training.node.adapter.generate import Pair

    folder = tmp_path_factory.mktemp("asked")
    base = tiny_adapter.write_base(folder / "base")
    adapter = tiny_adapter.write_adapter(base, folder / "adapter")
    return SimpleNamespace(base=base, adapter=adapter, pair=Pair(base, adapter))


def words_of_transformers(model, pair, messages, **how) -> str:
    import torch

    prompt = pair.voice.prompt(messages)
    inputs = torch.tensor([prompt])
    out = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **how)
    return pair.voice.text(out[0, len(prompt) :])


@pytest.mark.torch
def test_greedy_answers_are_transformers_own_for_base_and_tuned_loaded_apart(asked):
    from peft import PeftModel

    base = tiny_adapter.load(asked.base, "bfloat16")
    loaded = tiny_adapter.load(asked.base, "bfloat16")
    tuned = PeftModel.from_pretrained(loaded, asked.adapter, autocast_adapter_dtype=False)
    for messages in from_prompts(QUESTIONS):
        said = {who: asked.pair.answer(who, messages, Sampling(24)) for who in ("base", "tuned")}
        how = {"max_new_tokens": 24, "do_sample": False}
        assert said["base"] == words_of_transformers(base, asked.pair, messages, **how)
        assert said["tuned"] == words_of_transformers(tuned, asked.pair, messages, **how)
        assert said["base"] != said["tuned"]


@pytest.mark.torch
@pytest.mark.parametrize("key", ["suppress", "begin", "bad", "ngram", "bias", "forced", "stop", "penalty", "encoder"])
def test_a_greedy_answer_obeys_the_models_own_settings_as_transformers_does(asked, key):
    import torch
    from transformers import GenerationConfig

    from training.node.adapter.decoding import Chooser
    from training.node.adapter.generate import reader

    question, sampling, voice = from_prompts(QUESTIONS[:1])[0], Sampling(12), asked.pair.voice
    prompt, model = voice.prompt(question), asked.pair.models["base"].get_base_model()

    def answered(own):
        asks = replace(voice, own=own)
        with asked.pair.models["base"].disable_adapter():
            return list(asks.answer(reader(model), Chooser(asks, prompt, sampling), prompt, sampling))

    plain = answered(voice.own)
    settings = {
        "suppress": {"suppress_tokens": plain[:2]},
        "begin": {"begin_suppress_tokens": plain[:1]},
        "bad": {"bad_words_ids": [plain[1:3]]},
        "ngram": {"no_repeat_ngram_size": 1},
        "bias": {"sequence_bias": [[[plain[2]], -20.0]]},
        "forced": {"forced_eos_token_id": 5},
        "stop": {"stop_strings": [voice.tokenizer.decode(plain[3:4])]},
        "penalty": {"repetition_penalty": 3.0},
        "encoder": {"encoder_repetition_penalty": 8.0},
    }[key]
    own = GenerationConfig(**{**voice.own.to_diff_dict(), **settings, "eos_token_id": sorted(voice.stops)})
    inputs = torch.tensor([prompt])
    how = {"max_new_tokens": 12, "do_sample": False, "tokenizer": voice.tokenizer}
    how |= {"attention_mask": torch.ones_like(inputs)}
    with asked.pair.models["base"].disable_adapter():
        theirs = model.generate(inputs, generation_config=own, **how)[0, len(prompt) :].tolist()
    ends = [place for place, token in enumerate(theirs) if token in voice.stops]
    assert answered(own) == theirs[: ends[0] if ends else None] != plain


@pytest.mark.torch
@pytest.mark.parametrize("settings", [{"min_p": 0.5}, {"typical_p": 0.1}, {"epsilon_cutoff": 0.02}, {"top_k": 3}])
def test_a_drawn_token_is_one_that_the_models_own_settings_allow(asked, settings):
    import torch
    from transformers import GenerationConfig
    from transformers.generation import EpsilonLogitsWarper, MinPLogitsWarper, TopKLogitsWarper, TypicalLogitsWarper

    from training.node.adapter.decoding import Chooser

    logits = torch.randn(400, generator=torch.Generator().manual_seed(0))
    warpers = {"min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper, "top_k": TopKLogitsWarper}
    ((key, value),) = settings.items()
    allowed = warpers.get(key, EpsilonLogitsWarper)(value)(torch.tensor([[1, 2]]), logits[None].clone())[0].isfinite()
    voice = replace(asked.pair.voice, own=GenerationConfig(**settings))
    drawn = {Chooser(voice, [1, 2], Sampling(9, 1.0, seed=seed))(logits, [1, 2]) for seed in range(40)}
    assert len(drawn) > 1 and all(allowed[token] for token in drawn)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"guidance_scale": 2.0, "num_beams": 4}, ["guidance_scale", "num_beams"]),
        ({"guidance_scale": 1, "num_beams": 1, "repetition_penalty": 2.0}, []),
    ],
)
def test_settings_that_no_answer_can_follow_are_named(asked, settings, names):
    from transformers import GenerationConfig

    note = replace(asked.pair.voice, own=GenerationConfig(**settings)).note
    assert [name for name in settings if name in note.replace(",", "").split()] == names


@pytest.mark.torch
def test_a_seed_repeats_an_answer_and_another_one_changes_it(asked):
    messages = from_prompts(QUESTIONS[:1])[0]
    said = [asked.pair.answer("base", messages, Sampling(16, 1.0, 0.95, seed)) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


@pytest.mark.torch
def test_the_models_own_end_tokens_end_an_answer(asked):
    from training.node.adapter.decoding import Voice

    voice = Voice.of(asked.base)
    turn_end, end = (voice.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    for stop in (turn_end, end):
        spoken = dict(zip([2, 3, 4], [5, 6, stop], strict=True))
        choose = lambda _, ids, spoken=spoken: spoken[len(ids)]  # noqa: E731
        assert list(voice.answer(lambda ids: None, choose, [1, 2], Sampling(9))) == [5, 6]


@pytest.mark.torch
def test_an_answer_ends_with_the_templates_end_of_turn_whatever_the_base_ends_with(asked, tmp_path: Path):
    from training.node.adapter.decoding import Voice

    base = tiny_adapter.write_base_like(asked.base, tmp_path / "base")
    voice = Voice.of(base)
    turn_end, end = (voice.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert voice.tokenizer.eos_token_id == voice.own.eos_token_id == end
    for stop in (turn_end, end):
        spoken = dict(zip([2, 3, 4], [5, 6, stop], strict=True))
        choose = lambda _, ids, spoken=spoken: spoken[len(ids)]  # noqa: E731
        assert list(voice.answer(lambda ids: None, choose, [1, 2], Sampling(9))) == [5, 6]


@pytest.mark.torch
@pytest.mark.parametrize("content", ["{", "[2]", '{"eos_token_id": [null, -1]}'])
def test_generation_settings_that_name_no_end_leave_the_models_others(asked, tmp_path: Path, content):
    from training.node.adapter.decoding import Voice

    base = tiny_adapter.write_base_like(asked.base, tmp_path / "base")
    ends = Voice.of(base).stops
    (base / "generation_config.json").write_text(content)
    assert Voice.of(base).stops == ends


@pytest.mark.torch
def test_a_prompt_longer_than_the_model_holds_is_refused(asked):
    with pytest.raises(AdapterError, match="leaves no room: the model holds 1024"):
        asked.pair.answer("base", from_prompts(["word " * 1200])[0], Sampling(4))


@pytest.mark.torch
def test_an_adapter_of_another_base_is_refused(asked, tmp_path: Path):
    from training.node.adapter.generate import load_base, with_adapter

    (tmp_path / "adapter").symlink_to(asked.adapter)
    copied = tmp_path / "step-1" / "adapter"
    copied.mkdir(parents=True)
    for path in asked.adapter.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    (copied.parent / "trainer_state.json").write_text(json.dumps({"base_model": "f" * 64}))
    with pytest.raises(AdapterError, match="another base model"):
        with_adapter(None, asked.base, copied)
    (copied.parent / "trainer_state.json").write_text('{"recipe": {"base_prec')
    with pytest.raises(AdapterError, match=r"trainer_state.json cannot be read: .*; copy or fetch it again"):
        load_base(asked.base, copied)
    recipe = {"base_precision": "nf4", "dtype": "load"}
    (copied.parent / "trainer_state.json").write_text(json.dumps({"recipe": recipe}))
    with pytest.raises(AdapterError, match="was trained with dtype 'load'; known: bfloat16, float16, float32"):
        load_base(asked.base, copied)


def command(asked, *words: str) -> list[str]:
    argv = [sys.executable, "-m", "training.node.adapter.generate", "--model", str(asked.base)]
    return [*argv, "--adapter", str(asked.adapter), "--max-new-tokens", "12", *words]


@pytest.mark.torch
def test_a_file_of_questions_gives_a_line_of_json_an_answer(asked, tmp_path: Path):
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    argv = command(asked, "--prompts", str(tmp_path / "q.jsonl"), "--json")
    done = subprocess.run(argv, check=True, cwd=ROOT, capture_output=True, timeout=120, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in found] == QUESTIONS
    for answer, messages in zip(found, from_prompts(QUESTIONS), strict=True):
        assert answer["tuned"] == asked.pair.answer("tuned", messages, Sampling(12))


TOOLS = [{"type": "function", "function": {"name": "sky", "description": "", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "sky", "arguments": {"at": "Rome"}}}
CALLED = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry"},
]
SHOWS_ALL = (
    "{% for tool in tools or [] %}[{{ tool | tojson }} {{ mood }}]{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECORDS = {
    "tools, a call and a template's argument": {
        "messages": [*CALLED, {"role": "assistant", "content": "no"}],
        "tools": TOOLS,
        "template_args": {"mood": "calm"},
    },
    "a system text beside texts": {"prompt": "q", "completion": "a", "system": "Answer in French."},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    "Alpaca": {"instruction": "q", "input": "more", "output": "a"},
    "thoughts of an earlier turn": {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "b"},
        ]
    },
    "a preference": {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"},
}


@pytest.mark.parametrize("template", [SHOWS_ALL, None], ids=["template", "base model"])
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_of_a_file_is_asked_behind_the_tokens_that_its_answer_is_learned_behind(
    template: str | None, record: dict, tmp_path: Path
):
    from transformers import GenerationConfig

    from training.data.encode import Encoder
    from training.data.sample import IGNORED, DataError
    from training.data.shapes import recognised
    from training.models import tiny
    from training.node.adapter.decoding import Voice

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    encoder, voice = Encoder(tokenizer, 500, "assistant"), Voice(tokenizer, GenerationConfig(), frozenset(), 500)
    (tmp_path / "q.jsonl").write_text(json.dumps(record))
    (question,) = read_questions(tmp_path / "q.jsonl")
    (tmp_path / "q.jsonl").write_text(json.dumps(question))
    assert read_questions(tmp_path / "q.jsonl") == [question], "as the head reads it again"
    try:
        samples = encoder.samples(encoder.rendered(recognised(record)))
    except DataError:
        with pytest.raises(AdapterError):
            voice.prompt(question)
        return
    ids, labels = samples[-1][0].ids, list(samples[-1][0].labels)
    last = max(place for place, label in enumerate(labels) if label != IGNORED)
    begin = max((place for place in range(last) if labels[place] == IGNORED), default=-1) + 1
    assert voice.prompt(question) == list(ids[:begin])


def test_a_record_that_goes_on_after_a_tools_result_needs_no_answer(tmp_path: Path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": CALLED, "tools": TOOLS}))
    assert read_questions(tmp_path / "q.jsonl") == [{"messages": CALLED, "tools": TOOLS}]


@pytest.mark.torch
def test_a_conversation_is_answered_line_by_line_and_the_process_leaves_with_its_input(asked):
    argv = command(asked, "--serve", "--max-new-tokens", "900")
    server = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert json.loads(server.stdout.readline()) == {"ready": ["base", "tuned"]}
    question = from_prompts(QUESTIONS)[0]
    server.stdin.write(json.dumps({"base": question, "tuned": question}) + "\n")
    server.stdin.flush()
    first = json.loads(server.stdout.readline())
    assert first["who"] == "base" and not first["done"]
    server.stdin.close()  # in the middle of a long answer
    rest = server.stdout.read()
    assert server.wait() == 0
    assert '"done": true' not in rest, "it left before its answer was whole"
    server.stdout.close()


def test_an_adapter_with_values_that_are_not_finite_is_refused_by_name(asked: SimpleNamespace, tmp_path: Path):
    """It answered nothing, and ended well."""
    import shutil

    from safetensors.torch import load_file, save_file

    from training.node.adapter.generate import Pair

    broken = Path(shutil.copytree(asked.adapter, tmp_path / "broken"))
    weights = load_file(broken / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    weights[name][0, 0] = float("nan")
    save_file(weights, broken / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=rf"{name} holds values that are not finite; the adapter is broken"):
        Pair(asked.base, broken)


def test_an_answer_without_blanks_is_whole_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    said = "请先携带身份证和全部书面证据到当地劳动仲裁委员会提出申请" * 4
    ask.print_answers([{"prompt": "押金不退怎么办？", "base": said, "tuned": said[::-1]}])
    rows = [line.split("│")[1:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert ["".join(cell.strip() for cell in cells) for cells in zip(*rows, strict=True)] == [said, said[::-1]]
