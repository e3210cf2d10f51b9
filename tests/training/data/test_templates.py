"""The chat templates people have, swept: every answer is learned once and nothing else is, or it is refused by name.

Random conversations, each part of which holds a word that occurs nowhere else. What should be learned is known from
the conversation alone, not from anything the encoder finds. The templates are our own, which have the habits of real
ones, and TRL's where it is installed (the bench extra).
"""

from __future__ import annotations

import importlib.util
import random
import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the [train] extra")

from tests.support.chat_templates import CLOSED, OWN, TWO_ENDS
from training.data.encode import Encoder
from training.data.sample import IGNORED, BadRecord, DataError
from training.data.shapes import recognised
from training.models import tiny

pytestmark = pytest.mark.torch

CONVERSATIONS = 40


def _trl_templates():
    found = importlib.util.find_spec("trl")
    return sorted(Path(found.origin).parent.glob("chat_templates/*.jinja")) if found else []


class Talk:
    """A random conversation whose every part holds a word that occurs nowhere else."""

    def __init__(self, seed, tools=True, thoughts=True, pairs=True):
        self.chance = random.Random(seed)
        self.tools, self.thoughts, self.pairs = tools, thoughts, pairs
        self.count = 0
        self.answers, self.others = [], []
        """Words by turn: lists of (turn number, words)."""
        self.turns = []
        if self.chance.random() < 0.4:
            self._other("system")
        for _ in range(self.chance.randint(1, 3)):
            self._other("user")
            while self.tools and self.chance.random() < 0.4:
                self._call()
                for _ in range(self.chance.randint(1, 2)):
                    self._other("tool")
            self._answer()
            if self.pairs and self.chance.random() < 0.3:
                self._answer()
        self.record = {"messages": self.turns}
        if any("tool_calls" in turn for turn in self.turns):
            name, about = self.word(), self.word()
            self.others.append((0, [name, about]))
            function = {"name": name, "description": about, "parameters": {"type": "object", "properties": {}}}
            self.record["tools"] = [{"type": "function", "function": function}]

    def word(self):
        self.count += 1
        return f"wq{self.count}qw"

    def _other(self, role):
        words = [self.word()]
        turn = {"role": role, "content": f"some {words[0]} here"}
        if role == "tool":
            turn |= {"name": "look", "tool_call_id": "abcdefghi"}
        self.others.append((len(self.turns) + 1, words))
        self.turns.append(turn)

    def _answer(self):
        words, thought = [self.word()], ""
        if self.thoughts and self.chance.random() < 0.3:
            words.insert(0, self.word())
            thought = f"<think>\nhm {words[0]}\n</think>\n\n"
        self.answers.append((len(self.turns) + 1, words))
        self.turns.append({"role": "assistant", "content": f"{thought}so {words[-1]} it is"})

    def _call(self):
        words, calls, content = [], [], None
        if self.chance.random() < 0.3:
            words.append(self.word())
            content = f"let {words[-1]} see"
        for _ in range(self.chance.randint(1, 2)):
            key, value = self.word(), self.word()
            words += [key, value]
            function = {"name": self.word(), "arguments": {key: value}}
            calls.append({"type": "function", "id": "abcdefghi", "function": function})
        self.answers.append((len(self.turns) + 1, words))
        self.turns.append({"role": "assistant", "content": content, "tool_calls": calls})


WORD = re.compile(r"wq\d+qw")


def _segments(sample):
    """The learned tokens of each stretch."""
    found, before = [], False
    for label in sample.labels:
        if label != IGNORED:
            found = found if before else [*found, []]
            found[-1].append(label)
        before = label != IGNORED
    return found


def _held_against(talk, samples, tokenizer, ends):
    """What is wrong with `samples`, by what the conversation says alone."""
    wrong, learned = [], []
    for sample in samples:
        text = tokenizer.decode(sample.ids)
        for segment in _segments(sample):
            said = tokenizer.decode(segment)
            learned += WORD.findall(said)
            if not WORD.search(said):
                wrong.append(f"learned without a word: {said!r}")
            turns = {n for n, words in talk.answers if any(word in said for word in words)}
            if ends and said.count(ends) > len(turns):
                wrong.append(f"more than {len(turns)} turns learned: {said!r}")
            if ends and not said.rstrip().endswith(("|>", "｜>", ">", "]")):
                wrong.append(f"no end of turn: {said!r}")
        last = max((n for n, words in talk.answers if any(word in text for word in words)), default=0)
        for n, words in talk.others:
            if n < last:
                wrong += [f"{word} of turn {n} is not in the sample" for word in words if word not in text]
    wrong += [
        f"{word} of turn {n} learned {learned.count(word)} times"
        for n, words in talk.answers
        for word in words
        if learned.count(word) != 1
    ]
    wrong += [f"{word} of turn {n} learned" for n, words in talk.others for word in words if word in learned]
    return wrong


@pytest.fixture(scope="module")
def base():
    return tiny._tokenizer(["the quick brown fox says so here, let it see what it is and some more", "wq1qw wq2qw"])


SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]+[|｜]?>|<[^<>|｜\s]+[|｜]>|<(?:start|end)_of_[a-z]+>|</?s>|\[/?[A-Z_]+\]|<end_of_utterance>"
)


def _with(base, template):
    """A tokenizer with this chat template, its marks being special tokens."""
    import copy

    from transformers import AddedToken

    found = copy.deepcopy(base)
    names = dict.fromkeys(SPECIAL.findall(template))
    found.add_tokens([AddedToken(name, special=True) for name in names])
    found.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"})
    found.chat_template = template
    return found


def _swept(tokenizer, talks):
    """(learned exactly, refused: the reasons, wrong: what is)."""
    exact, refused, wrong = 0, [], []
    try:
        encoder = Encoder(tokenizer, 100_000, "assistant")
    except DataError as error:
        return 0, [str(error)] * len(talks), []
    for talk in talks:
        try:
            rendered = encoder.rendered(recognised(talk.record))
        except BadRecord as error:
            refused.append(str(error))
            continue
        found = _held_against(
            talk, [sample for sample, _ in encoder.samples(rendered)], tokenizer, encoder.template.end_of_turn
        )
        wrong += [(talk.record, found)] if found else []
        exact += not found
    return exact, refused, wrong


NAMED = re.compile(
    r"(leaves out (.* of turn \d+|the tools);)"
    r"|(answer of turn \d+ begins and ends cannot be told)|(does not end turn \d+)|(cannot render it: .+)"
    r"|(leaves out what the assistant says$)|(turn \d+ has thoughts, but .* asks for an answer without any)"
    r"|(cannot render a question and its answer: .+)|(marks \d+ of \d+ assistant turns)"
)
LEARNS_ALL = {"TOOLS", "TEXT_ARGUMENTS"}
"""Of our own: those that show every part of every conversation."""


@pytest.mark.parametrize("name", OWN)
def test_under_our_own_templates_every_answer_is_learned_once_or_refused_by_name(base, name):
    exact, refused, wrong = _swept(_with(base, OWN[name]), [Talk(seed) for seed in range(CONVERSATIONS)])
    assert wrong == []
    assert [reason for reason in refused if not NAMED.search(reason)] == []
    assert exact + len(refused) == CONVERSATIONS and exact >= 4
    assert not refused or name not in LEARNS_ALL


ASKED = {"messages": [{"role": role, "content": text} for role, text in 2 * [("user", "it"), ("assistant", "so")]]}


def _ends(tokenizer):
    """What is learned behind the words of each answer."""
    encoder = Encoder(tokenizer, 100_000, "assistant")
    samples = [sample for sample, _ in encoder.samples(encoder.rendered(recognised(ASKED)))]
    said = [tokenizer.decode(segment) for sample in samples for segment in _segments(sample)]
    return encoder.template.end_of_turn, {text.partition("so")[2] for text in said}


def test_the_end_of_a_text_right_behind_the_end_of_an_answer_is_learned_with_it(base):
    assert _ends(_with(base, CLOSED)) == ("<|endoftext|>", {"<|end_response|><|endoftext|>"})
    once = TWO_ENDS.replace("<|im_end|>\\n", "<|im_end|>")  # of the whole conversation, not of a turn
    assert _ends(_with(base, once)) == ("<|im_end|>", {"<|im_end|>"})


@pytest.mark.trl
def test_cohere2_learns_its_eos(base):
    path = next(path for path in _trl_templates() if path.stem == "cohere2_training")
    tokenizer = _with(base, path.read_text(encoding="utf-8"))
    tokenizer.eos_token = "<|END_OF_TURN_TOKEN|>"
    end = "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    assert _ends(tokenizer) == ("<|END_OF_TURN_TOKEN|>", {end})


@pytest.mark.trl
@pytest.mark.parametrize("path", _trl_templates() or [Path("none")], ids=lambda path: path.stem)
def test_under_the_templates_that_trl_carries_every_answer_is_learned_once_or_refused_by_name(base, path):
    talks = [Talk(seed) for seed in range(CONVERSATIONS)]
    exact, refused, wrong = _swept(_with(base, path.read_text(encoding="utf-8")), talks)
    assert wrong == []
    assert [reason for reason in refused if not NAMED.search(reason)] == []
    assert exact + len(refused) == CONVERSATIONS
    if path.stem in {"qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "lfm2_v2", "glm4moe"}:
        assert refused == []


def test_a_template_without_an_end_is_ended(monkeypatch):
    monkeypatch.setattr("training.data.template.RENDER_S", 0.3)
    tokenizer = tiny.tokenizer()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = loop + tokenizer.chat_template
    began = time.process_time()
    with pytest.raises(DataError, match=r"did not render a conversation within 0\.3 s"):
        Encoder(tokenizer, 100, "assistant")
    assert time.process_time() - began < 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
