"""`fab plan`: which machines it goes by, whose rates, how many tokens, and what it prints."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from math import inf
from pathlib import Path

import pytest

from inventory.cloud import opening
from inventory.cloud.values import Instance, InstanceType
from inventory.renting import tags
from inventory.settings import load_settings
from tests.support import programs
from tests.support.memory_cloud import MemoryCloud
from tests.support.memory_settings import MemorySettings
from tests.support.paper_cluster import PaperCluster
from tests.support.small_models import HYBRIDS, WRAPPERS
from tests.training.plan.test_calibration import MADE
from training.cost.cards import Rates, card_bytes
from training.cost.shape import known_shape
from training.data.sample import DataError
from training.laptop import data_size, data_view, machines
from training.laptop.data_size import size_of
from training.laptop.data_view import Question
from training.laptop.machines import fleet
from training.laptop.preparing import Measurements
from training.laptop.start_run import resolve_recipe
from training.models import tiny
from training.models.names import load_recipe, recipe_names
from training.plan import calibration
from training.plan.notes import MIXTURES
from training.recipe.base import TINY, Base
from training.recipe.model_types import once_a_sample
from training.run.launch import LaunchError

ROOT = Path(__file__).parents[3]
LISTED = """\
name = "mine"
provider = "static"
[ssh]
key = "{folder}/key"
[network]
line_rate_gbps = 16
[[nodes]]
name = "te1"
address = "203.0.113.11"
price_per_hour = 10
currency = "CNY"
[[nodes]]
name = "te2"
address = "203.0.113.12"
price_per_hour = 10
currency = "CNY"
"""
WORDS = {"prompt": "What is this? ", "completion": "It is something else, as far as anybody can say."}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with two listed nodes, and nothing that was ever measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "key").write_text("")
    (tmp_path / "cluster.toml").write_text(LISTED.format(folder=tmp_path))
    (tmp_path / "fabfile.py").write_text("from training.laptop.tasks import namespace\n")
    return tmp_path


def settings_of(place):
    return load_settings(place / "cluster.toml")


def measured(place, **changes):
    made = replace(MADE, **changes)
    folder = place / "runs" / made.run_id
    folder.mkdir(parents=True)
    (folder / calibration.FILE).write_text(calibration.calibration_text(made))
    return made


def planned_on(place, card="", **wish):
    return machines.machines(settings_of(place), fleet(settings_of(place), cards=machines.named_cards(card), **wish))


def records(place, count=50, name="data.jsonl"):
    file = place / name
    file.write_text("".join(json.dumps(WORDS) + "\n" for _ in range(count)))
    return str(file)


def fab(place, *words):
    env = {**os.environ, "PYTHONPATH": programs.PATH, "SPOTUNE_CLUSTER": str(place / "cluster.toml")}
    return subprocess.run(
        [sys.executable, "-m", "fabric", "plan", *words], cwd=place, env=env, capture_output=True, text=True
    )


def refused(done):
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def with_cards(place, *kinds):
    """What the listed nodes are said to have."""
    parts = (place / "cluster.toml").read_text().split("price_per_hour")
    for k, kind in enumerate(kinds):
        parts[k] += f'card = "{kind}"\n' if kind else ""
    (place / "cluster.toml").write_text("price_per_hour".join(parts))


def test_a_bad_record_of_the_data_is_left_out_of_a_plan_where_that_is_asked_for(place):
    file = Path(records(place))
    file.write_text('{"prompt": "only"}\n' + file.read_text())
    done = fab(place, "--model", "tiny", "--data", "data.jsonl", "--card", "A10")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1 bad record: fix them, or skip them with --skip-bad" in done.stderr
    with_cards(place, "A10", "A10")
    done = fab(place, "--model", "tiny", "--data", "data.jsonl", "--skip-bad")
    assert done.returncode == 0 and "data: 50 records" in done.stdout, done.stdout + done.stderr
    assert "; 1 bad record left out)" in done.stdout
    assert "--data data.jsonl --skip-bad" in done.stdout
    file.write_text('{"prompt": "only"}\n')
    assert "no record in it but 1 bad: data.jsonl line 1" in refused(
        fab(place, "--model", "tiny", "--data", "data.jsonl", "--skip-bad")
    )


def test_listed_machines_are_planned_with_their_number_price_and_promised_network(place):
    with_cards(place, "A10", "A10")
    found = planned_on(place, card="A10")
    assert (found.ranks, found.ranks_per_node, found.price_h, found.currency) == (2, 1, 20, "CNY")
    assert found.rates == Rates(40e12, pytest.approx(1.7e9), 600e9) and found.link_from == "its promised line rate"
    assert planned_on(place, card="A10", nodes=3).price_h == 30


def test_another_kind_of_card_is_not_charged_at_the_listed_machines_price(place):
    for kinds in ((), ("A10", "A10")):
        with_cards(place, *kinds)
        found = fleet(settings_of(place), cards=("H200",), nodes=1)
        assert found.price_h is None and found.notes[0].startswith("the price of the listed machines is not taken: ")
    said = fleet(settings_of(place), cards=("H200",), nodes=2, node_price_h=34.5)
    assert (said.price_h, said.notes) == (69, ())


def test_nodes_that_say_which_cards_they_have_need_no_card_and_get_a_start(place):
    with_cards(place, "A10", "A10")
    assert (planned_on(place).card, fleet(settings_of(place)).own) == ("A10", True)
    (command,) = next_line(place, "--model", "qwen2.5-14b", "--card", "NVIDIA A10")
    assert command == "next: fab train --model qwen2.5-14b"
    assert not fleet(settings_of(place), cards=("A100",)).own


def test_nodes_of_several_kinds_are_planned_as_mixed_cards(place):
    with_cards(place, "RTX4090", "A10")
    assert fleet(settings_of(place)).kinds == ("RTX 4090", "A10")
    assert {card.card for card in planned_on(place).mixed} == {"A10", "RTX 4090"}
    with pytest.raises(LaunchError, match=r"^--nodes 3: 2 are listed, with RTX 4090 and A10 cards; which would more"):
        fleet(settings_of(place), nodes=3)


def test_the_node_that_lacks_a_card_or_a_price_is_named(place):
    with_cards(place, "A10")
    with pytest.raises(LaunchError, match=r'^nothing says which cards te2 has: write card = "A10" into its \[\[nodes'):
        planned_on(place)
    text = (place / "cluster.toml").read_text()
    (place / "cluster.toml").write_text(text[: text.rindex("price_per_hour")] + 'card = "A10"\ncurrency = "CNY"\n')
    (note,) = fleet(settings_of(place)).notes
    assert note.startswith("no price is known, as te2 has none")


def test_a_listed_card_that_is_not_known_is_refused(place):
    with_cards(place, "Z80", "A10")
    with pytest.raises(
        LaunchError, match=r"^cluster.toml: nodes.card of te1: Z80: nothing is known of it; known: H200"
    ):
        fleet(settings_of(place))


def test_a_rate_from_the_table_is_called_the_weakest_number_until_the_card_was_measured(place):
    assert planned_on(place, card="A10").weakest == "40 TFLOP/s of A10, from a table: not measured on these cards"
    made = measured(place)
    found = planned_on(place)
    assert found.card == "NVIDIA A10" and found.weakest == ""
    assert found.rates.flops == pytest.approx(0.6 * made.matmul_flops)
    assert found.flops_from == f"measured by {made.run_id}"
    assert (found.rates.bytes_per_s, found.link_from) == (made.link_bytes_per_s, made.run_id)


def test_what_was_measured_is_of_these_machines_alone(place):
    measured(place, world_size=4)
    assert planned_on(place).link_from == "its promised line rate"
    assert planned_on(place, card="H20").flops_from == "the table of cards"
    measured(place, run_id="prove-20260102-000000", time=200.0, nodes=("te1", "te9"))
    assert planned_on(place).link_from == "its promised line rate"


def test_the_ram_of_listed_nodes_is_known_once_it_was_measured(place):
    assert planned_on(place, card="A10").ram_bytes == inf
    made = measured(place, ram_bytes=188 * 2**30, nodes=("te2", "te1"))
    found = planned_on(place)
    assert (found.ram_bytes, found.link_from) == (made.ram_bytes, made.run_id)
    assert planned_on(place, card="H20").ram_bytes == inf


def test_cpus_are_planned_with_what_was_measured_of_them(place):
    listed = (place / "cluster.toml").read_text()
    (place / "cluster.toml").write_text(listed.replace("price_per_hour", "gpus = 0\nprice_per_hour"))
    assert (planned_on(place).card, planned_on(place).rates.flops) == (None, None)
    made = measured(place, card=None, matmul_flops=2e11)
    found = planned_on(place)
    assert (found.card, found.flops_from) == (None, f"measured by {made.run_id}")
    assert found.rates.flops == pytest.approx(0.6 * 2e11)
    done = fab(place, "--model", "tiny")
    assert f"0.12 TFLOP/s a CPU, measured by {made.run_id}" in done.stdout
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("take ")]
    assert float(row[row.index("compute") + 1 if "compute" in row else row.index("link") + 1]) > 0


def test_cards_of_several_kinds_are_planned_by_the_weakest_but_in_stages(place):
    found = planned_on(place, card="RTX 4090,A10")
    assert [card.card for card in found.mixed] == ["A10", "RTX 4090"], "the slowest first"
    assert found.rates == Rates(40e12, pytest.approx(1.7e9), memory_bytes_per_s=600e9, each=(40e12, 102e12))
    alone = planned_on(place, card="A10")
    assert (found.card, found.card_bytes, found.usable_bytes) == (alone.card, alone.card_bytes, alone.usable_bytes)
    assert found.mixed[1].usable_bytes > found.usable_bytes
    assert planned_on(place, card="A10,A10").mixed == ()
    with pytest.raises(LaunchError, match="--card A10,L20 names the cards of 2 nodes, and --nodes says 3"):
        planned_on(place, card="A10,L20", nodes=3)
    with pytest.raises(LaunchError, match="--card Z80: nothing is known of it"):
        planned_on(place, card="A10,Z80")


def test_another_clusters_measurements_are_not_gone_by(place):
    measured(place, cluster="other")
    with pytest.raises(LaunchError, match=r"nothing says which cards te1 and te2 .*fab plan --model NAME --card A10$"):
        planned_on(place)


def test_the_newest_measurement_counts_and_a_damaged_one_is_said(place, capsys):
    measured(place, run_id="prove-20260101-000000", time=1.0, matmul_flops=50e12)
    measured(place, run_id="prove-20260102-000000", time=2.0)
    (place / "runs" / "prove-20260103-000000").mkdir()
    (place / "runs" / "prove-20260103-000000" / calibration.FILE).write_text("{cut")
    assert planned_on(place).flops_from == "measured by prove-20260102-000000"
    assert "prove-20260103-000000/calibration.json is left out" in capsys.readouterr().err


def test_machines_to_be_rented_are_planned_as_the_cloud_describes_and_prices_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with PaperCluster(tmp_path, monkeypatch, aliyun='types = ["ecs.gn7i-c8g1.2xlarge"]\nnodes = 4\n') as cluster:
        found = fleet(cluster.settings)
        one = cluster.plan(1).quotes[0].price.trade
    assert (found.nodes, found.cards, found.card, found.ram_gib, found.line_rate_gbps) == (4, 1, "NVIDIA A10", 30, 16)
    assert found.price_h == pytest.approx(4 * one) and found.currency == "CNY"
    assert found.about.startswith("ecs.gn7i-c8g1.2xlarge in ") and found.about.endswith("to be rented (no stock)")


def test_machines_to_be_rented_take_no_link_that_was_measured_on_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with PaperCluster(tmp_path, monkeypatch, aliyun='types = ["ecs.gn7i-c8g1.2xlarge"]\nnodes = 2\n') as cluster:
        made = measured(tmp_path, cluster=cluster.settings.name)
        found = machines.machines(cluster.settings, fleet(cluster.settings))
    assert (found.flops_from, found.link_from) == (f"measured by {made.run_id}", "its promised line rate")


def test_machines_that_stand_are_planned_with_what_they_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(2)
        stands, wanted = fleet(cluster.settings), fleet(cluster.settings, nodes=3)
    assert (stands.nodes, stands.cards, stands.about) == (2, 0, "ecs.local.small, as they stand")
    assert stands.price_h == pytest.approx(2 / 3 * wanted.price_h, rel=0.01)
    assert "to be rented" in wanted.about
    cpu = machines.machines(cluster.settings, stands)
    assert (cpu.card, cpu.ranks, cpu.card_bytes) == (None, 2, stands.ram_gib * 2**30)


def test_machines_of_two_types_that_stand_together_are_planned_as_cards_of_two_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a100, a10 = InstanceType("a100", 16, 125, 1, "NVIDIA A100", 80, 8), InstanceType("a10", 8, 30, 2, "NVIDIA A10", 24)
    cloud, settings = MemoryCloud(gpus=[(a100, 34.0), (a10, 12.0)]), MemorySettings(name="demo")
    monkeypatch.setitem(opening.OPENED_BY, "memory", lambda settings, record: cloud)
    for k, kind in enumerate((a100, a10), start=1):
        made = Instance(f"i-{k}", f"demo-te{k}", "Running", kind.name, "nowhere-1a", datetime.now(UTC))
        cloud.all[made.instance_id] = replace(made, tags={**tags.of_cluster("demo")})
    found = fleet(settings)
    assert (found.kinds, found.slots, found.ram_gib) == (("NVIDIA A100", "NVIDIA A10"), (1, 2), 30)
    assert found.about == "a100 and a10, as they stand"
    at = machines.machines(settings, found, known=Measurements())
    assert [card.card for card in at.mixed] == ["NVIDIA A100", "NVIDIA A10", "NVIDIA A10"], "the head stays the first"
    assert at.card_bytes == card_bytes("A10")


def test_a_cloud_that_does_not_answer_leaves_a_way_to_plan(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        settings = cluster.settings
    with pytest.raises(LaunchError) as refused:
        fleet(settings)
    assert str(refused.value).endswith(
        "; to plan without asking the cloud: fab plan --model NAME --card A10; "
        "fab train --model NAME --data FILE --here --dry plans on this machine"
    )
    assert fleet(settings, cards=("A10",)).cards == 1


def test_without_a_tokenizer_tokens_are_estimated_from_the_text_and_said_to_be(place):
    recipe = load_recipe("qwen2.5-7b")
    size = size_of((records(place),), recipe)
    text = len("\n".join(WORDS.values()))
    assert size.how == "estimated: four bytes of text a token"
    assert size.records == 50 and size.work.tokens == 50 * (round(text / 4) + 2 * data_size.TURN_TOKENS)
    assert size.work.rows == 1 and size.work.longest == size.work.tokens // 50


@pytest.mark.parametrize(
    ("settings", "goal"),
    [({}, "sft"), ({"validation.fraction": "0.1"}, "sft"), ({"batching": "padded"}, "sft"), ({"goal": "dpo"}, "dpo")],
)
def test_with_the_tokenizer_they_are_counted_as_fab_data_counts_them(place, settings, goal):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    tiny.write_data(path := place / "data.jsonl", goal)
    recipe = load_recipe("tiny", settings)
    size = size_of((str(path),), recipe)
    asked = Question((str(path),), "tiny", recipe, here=True)
    seen = data_view.look(asked, datetime.now(UTC), lambda *_: None)
    assert size.how == "counted with the model's tokenizer"
    assert (size.work.rows, size.work.tokens) == (seen.train.rows, seen.train.tokens)
    assert size.records == seen.train.samples // (2 if goal == "dpo" else 1) > 300
    assert recipe.total_steps(size.work.rows) == seen.steps


def test_of_much_text_the_first_part_is_counted_and_the_rest_reckoned_by_it(place, monkeypatch):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    tiny.write_data(path := place / "data.jsonl")
    whole = size_of((str(path),), recipe := load_recipe("tiny"))
    monkeypatch.setattr(data_size, "SAMPLE_BYTES", path.stat().st_size // 4)
    sampled = size_of((str(path),), recipe)
    assert sampled.how.startswith("the first 0 MB of them counted")
    for found, is_so in ((sampled.work.tokens, whole.work.tokens), (sampled.work.rows, whole.work.rows)):
        assert found == pytest.approx(is_so, rel=0.1)
    assert sampled.records == pytest.approx(whole.records, rel=0.1)


def test_long_records_ahead_do_not_decide_what_the_short_ones_after_them_come_to(place):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    recipe = load_recipe("tiny", {"validation.fraction": "0.05"})
    lines = [json.dumps({"text": "word " * length}) for length in [500_000] + [20] * 300]
    (path := place / "data.jsonl").write_text("\n".join(lines))
    size = size_of((str(path),), recipe)
    assert size.records == 286 and size.work.longest == 192
    cut = [json.dumps({"prompt": "word " * 20_000, "completion": "never seen"})] * 1500
    good = [json.dumps(WORDS)] * 3000
    path.write_text("\n".join([*cut, *good]))
    assert size_of((str(path),), load_recipe("tiny")).how == "estimated: four bytes of text a token"


def test_much_text_is_not_read_whole_for_the_sake_of_long_records(place, monkeypatch):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    from training.data.encode import Encoder

    seen, rendered = [], Encoder.rendered
    monkeypatch.setattr(Encoder, "rendered", lambda self, one: seen.append(one) or rendered(self, one))
    (path := place / "data.jsonl").write_text("\n".join([json.dumps({"text": "word " * 20_000})] * 200))
    size = size_of((str(path),), load_recipe("tiny", {"validation.fraction": "0.05"}))
    assert len(seen) == 79 and size.how == "the first 8 MB of them counted with the model's tokenizer"
    assert size.records == size.work.rows == 190


@pytest.mark.parametrize("count", [50, 3000])
def test_what_is_wrong_with_all_records_is_said_however_many_there_are(place, count, monkeypatch):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    monkeypatch.setattr(data_size, "SAMPLE_BYTES", 20_000)
    with pytest.raises(DataError, match="pad_token '<nosuch>' is no token of tiny"):
        size_of((records(place, count),), load_recipe("tiny", {"pad_token": "<nosuch>"}))


@pytest.mark.parametrize("lies", ["own cache", "hub's cache", "own folder"])
def test_a_tokenizer_that_came_without_its_words_counts_nothing(place, monkeypatch, lies):
    tokenizer = tiny.tokenizer() if find_spec("transformers") else pytest.skip("needs the [train] extra")
    recipe = load_recipe("qwen2.5-7b")
    hub = place / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    homes = {
        "own cache": place / ".cache" / "spotune" / "models" / recipe.model_dir,
        "hub's cache": hub / f"models--{recipe.base_model.name.replace('/', '--')}" / "snapshots" / recipe.revision,
        "own folder": place / "mine",
    }
    if lies == "own folder":
        recipe = recipe.model_copy(update={"base_model": Base.parse(f"folder:{homes[lies]}")})
    tokenizer.save_pretrained(homes[lies])
    (homes[lies] / "config.json").write_text("{}")
    assert size_of((records(place),), recipe).how == "counted with the model's tokenizer"
    (homes[lies] / "tokenizer.json").unlink()
    if lies == "own folder":
        with pytest.raises(DataError, match=r"the tokenizer at .*mine knows no words: is its tokenizer\.json there\?"):
            size_of((records(place),), recipe)
    else:
        assert size_of((records(place),), recipe).how == "estimated: four bytes of text a token"


def test_a_folder_of_ones_own_is_planned_before_it_was_ever_trained(place):
    pytest.importorskip("transformers", reason="needs the [train] extra")
    from tests.support.tiny_adapter import write_base

    write_base(folder := place / "我的 模型")
    recipe = resolve_recipe(str(folder), ())
    size = size_of((records(place),), recipe)
    assert size.how == "counted with the model's tokenizer" and size.records == 50


def test_long_records_are_cut_and_padded_ones_have_a_row_each(place):
    recipe = load_recipe("qwen2.5-7b", {"max_length": "16", "batching": "padded", "validation.fraction": "0.1"})
    size = size_of((records(place),), recipe)
    assert (size.work.rows, size.work.tokens, size.work.longest) == (45, 45 * 16, 16)


def test_tiny_brings_its_own_data_and_others_none():
    own, other = load_recipe("tiny"), load_recipe("qwen2.5-7b")
    assert own.base_model == TINY and size_of((), own).records == 400
    assert size_of((), other) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say which model: --model NAME; fab models lists all "),
        (("--model", "gpt-5"), "unknown model 'gpt-5'; --model OWNER/NAME takes a model of the Hub; fab "),
        (("--model", "qwen2.5-7b"), "nothing says which cards te1 and te2 have: write card = "),
        (("--model", "qwen2.5-7b", "--card", "Z80"), "--card Z80: nothing is known of it; known: H200, "),
        (("--model", "qwen2.5-7b", "--card", "A10", "--nodes=-1"), "--nodes -1: it has to be above 0"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--hours=-2"), "--hours -2: it has to be above 0, and finite"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--hours", "0"), "--hours 0: it has to be above 0, and finite"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--hours", "nan"), "--hours nan: it has to be above 0, and finite"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--hours", "soon"), "--hours needs a number, not 'soon'"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--line-rate-gbps", "inf"), "--line-rate-gbps inf: it has to be"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--price-per-hour=0"), "--price-per-hour 0: it has to be above 0"),
        (
            ("--model", "qwen2.5-7b", "--card", "A10", "--price-per-hour", "-3"),
            "--price-per-hour -3: it has to be above 0",
        ),
        (
            ("--model", "qwen2.5-7b", "--card", "A10", "--price-per-hour", "x"),
            "--price-per-hour needs a number, not 'x'",
        ),
        (
            ("--model", "qwen2.5-7b", "--card", "A10", "--line-rate-gbps", "0"),
            "--line-rate-gbps 0: it has to be above 0",
        ),
        (("--model", "qwen2.5-7b", "--card", "A10", "--line-rate-gbps", "nan"), "--line-rate-gbps nan: it has to be"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--data", "none.jsonl"), "none.jsonl: no such file or folder"),
        (("--model", "qwen2.5-7b", "--card", "A10", "--data", "own/set"), "--data own/set: a data set of the Hub"),
        (
            ("--model", "qwen2.5-7b", "--card", "A10", "--set", "base_model=a/b"),
            "the shape of a/b is not known here: no recipe that is shipped names it",
        ),
    ],
)
def test_bad_input_is_one_sentence(place, words, said):
    assert refused(fab(place, *words)).startswith(said)


def test_the_table_says_what_it_rests_on_which_to_take_and_what_to_type(place):
    data = records(place, 3000)
    began = time.process_time()
    with_cards(place, "A10", "A10")
    done = fab(place, "--model", "qwen2.5-7b", "--card", "A10", "--data", data, "--hours", "1", "--set", "seed=3",
               "--set", "micro_batch=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if "of 28" in line]
    assert [row[: 2 + (row[0] == "as")] for row in rows] == [
        *(["zero0", "2"], ["zero1", "2"], ["zero2", "2"], ["zero3", "2"]),
        ["take", "pipeline"],
    ]
    assert "the recipe leaves strategy and gradient_checkpointing to the plan of a start" in said_by(done)
    header = next(line for line in lines if "strategy" in line)
    assert [word in header for word in ("tokens/s", "in 1 h", "CNY  ", "CNY a million tokens")] == [True] * 4
    said = done.stdout
    assert "40 TFLOP/s a card, the table of cards; 1.7 GB/s between ranks, its promised line rate" in said
    assert (
        "the weakest number is 40 TFLOP/s of A10, from a table: not measured on these cards; times of rows bound"
        in said
    )
    assert "time and cost cover the run itself, including model loading and the first step; booting, the base" in said
    assert "3000 records" in said and "(estimated: four bytes of text a token), x 3 epochs = " in said
    rows, steps = (int(re.search(words, said)[1]) for words in (r" in (\d+) rows to learn", r"epochs = (\d+) steps"))
    assert steps == math.ceil(3 * rows / 16)
    assert "pipeline: 2 stages: layers 14, 14; of them recomputed 9, 4; micro-batches held 2, 1" in lines
    assert time.process_time() - began < 5


def test_figures_of_a_network_that_nobody_knows_are_those_of_the_rate_that_is_said_to_be_taken(place):
    known = fab(place, "--model", "qwen2.5-7b", "--card", "A10", "--data", records(place), "--json")
    (place / "cluster.toml").write_text(LISTED.format(folder=place).replace("line_rate_gbps = 16\n", ""))
    words = ("--model", "qwen2.5-7b", "--card", "A10", "--data", records(place))
    taken = json.loads(fab(place, *words, "--json").stdout)
    assert taken["options"] == json.loads(known.stdout)["options"] and taken["chosen"]["minutes"]
    said = said_by(fab(place, *words))
    line = (
        "are computed taking the network for 16 Gbit/s: fab check measures it, line_rate_gbps in cluster.toml says it"
    )
    assert line in said and line in " ".join(taken["notes"])
    assert "1.7 GB/s between ranks, taken for 16 Gbit/s" in said


def test_where_no_figure_can_be_computed_no_footnote_explains_them(place):
    (place / "cluster.toml").write_text(LISTED.format(folder=place) + "gpus = 0\n")
    words = (
        "--model",
        "qwen2.5-0.5b",
        "--card",
        "Unheard X1 80GB",
        "--data",
        records(place),
        "--price-per-hour",
        "8.5",
    )
    done = fab(place, *words)
    assert "take: " in done.stdout and "computing not known" in done.stdout, done.stderr
    assert "time and cost cover the run itself" not in done.stdout


def test_what_a_start_would_say_of_few_records_is_said_before_anything_is_paid(place):
    words = ("--model", "qwen2.5-7b", "--card", "A10", "--nodes", "2", "--price-per-hour", "8", "--data")
    said = fab(place, *words, records(place, 80)).stdout
    assert "records: 80 to learn from" in said and "every step sees a row more than once" in said
    assert "16.00 CNY an hour" in said
    assert "records: 4 to learn from" in (few := fab(place, *words, records(place, 4)).stdout) and "--anyway" in few
    assert "to learn from, " not in fab(place, *words, records(place, 500), "--set", "batching=padded").stdout
    (place / "cluster.toml").write_text((place / "cluster.toml").read_text().replace('currency = "CNY"\n', ""))
    unnamed = fab(place, *words[:-1]).stdout
    assert "16.00 an hour (in the currency of --price-per-hour)" in unnamed and "price a million tokens" in unnamed


def said_by(done):
    return " ".join(done.stdout.split())


def test_a_recipe_that_leaves_nothing_open_has_its_own_row(place):
    named = [
        word for key in ("strategy=zero3", "micro_batch=1", "gradient_checkpointing=true") for word in ("--set", key)
    ]
    said = said_by(fab(place, "--model", "qwen2.5-3b", "--card", "A10", *named))
    assert "as is zero3" in said and "as is: what the recipe says now" in said


def test_where_nothing_fits_the_status_says_so_and_one_step_is_proposed(place):
    small = fab(place, "--model", "qwen2.5-14b", "--card", "A10", "--nodes", "1", "--price-per-hour", "10")
    assert small.returncode == 2 and small.stderr == ""
    words = "--nodes 1 --card A10 --price-per-hour 10 --set base_precision=nf4"
    assert small.stdout.splitlines()[-1] == f"next: fab plan --model qwen2.5-14b {words}"
    assert "of the run alone" not in small.stdout and "weakest number" not in small.stdout
    assert "stages: layers" not in small.stdout and "between ranks" not in small.stdout
    more = fab(place, "--model", "qwen2.5-32b", "--card", "A10", "--nodes", "1")
    step = "next: 4 such nodes would do: fab plan --model qwen2.5-32b --nodes 4 --card A10"
    assert (more.returncode, more.stdout.splitlines()[-1]) == (2, step)
    none = fab(place, "--model", "qwen2.5-72b", "--card", "T4", "--nodes", "1", "--set", "dtype=float16", "--json")
    assert none.returncode == 2 and json.loads(none.stdout)["chosen"] is None


def next_line(place, *words):
    done = fab(place, *words)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "what-if" in line or line.startswith("next: ")]


def test_the_start_that_is_printed_leaves_the_plan_to_the_start_which_may_find_fewer_machines(place):
    measured(place)
    data = records(place)
    words = ("--model", "qwen2.5-14b", "--data", data, "--set", "seed=3", "--set", "micro_batch=1", "--nodes", "2")
    (command,) = next_line(place, *words)
    assert command == f"next: fab train --model qwen2.5-14b --data {data} --set seed=3 --set micro_batch=1"
    assert resolve_recipe("qwen2.5-14b", ["micro_batch=1"], "").auto == ("strategy", "gradient_checkpointing")


def test_what_a_recipe_says_itself_is_given_to_the_plan_where_another_way_is_taken(place):
    measured(place)
    (command,) = next_line(place, "--model", "tiny")
    left = "--set strategy=auto --set micro_batch=auto --set gradient_checkpointing=auto"
    assert command == f"next: fab train --model tiny {left}"
    recipe = resolve_recipe("tiny", [word for word in command.split() if "=" in word], "")
    assert recipe.auto == ("strategy", "micro_batch", "gradient_checkpointing")


@pytest.mark.parametrize("wish", [("--nodes", "4"), ("--card", "A10"), ("--line-rate-gbps", "5")])
def test_for_a_what_if_no_start_is_proposed(place, wish):
    measured(place)
    (said,) = next_line(place, "--model", "qwen2.5-3b", *wish)
    count = 4 if "--nodes" in wish else 2
    assert re.match(
        rf"a what-if, so no start is proposed: {count} nodes, each 1 x (NVIDIA )?A10; fab train decides", said
    )


def listed(place, *nodes):
    """Of cards and price an hour each."""
    kept = LISTED.format(folder=place).partition("[[nodes]]")[0]
    entry = '[[nodes]]\nname = "te{k}"\naddress = "203.0.113.{k}"\ngpus = {gpus}\nprice_per_hour = {price}\n'
    text = "".join(entry.format(k=k, gpus=gpus, price=price) for k, (gpus, price) in enumerate(nodes, start=1))
    (place / "cluster.toml").write_text(kept + text)


def test_listed_nodes_with_different_cards_and_prices_have_the_ranks_that_a_launch_starts_there(place):
    listed(place, (1, 10), (8, 80))
    with_cards(place, "A10", "A10")
    both, first = planned_on(place, card="A10"), planned_on(place, card="A10", nodes=1)
    assert (both.ranks, both.ranks_per_node, both.price_h) == (9, 8, 90)
    assert (first.ranks, first.ranks_per_node, first.price_h) == (1, 1, 10)
    done = fab(place, "--model", "qwen2.5-3b", "--card", "A10")
    assert "machines: 2, each 1 or 8 x A10 (as listed); 90.00 an hour" in done.stdout
    with pytest.raises(LaunchError, match=r"^--nodes 3: 2 are listed, with 1 and 8 cards; how many would more have"):
        planned_on(place, card="A10", nodes=3)


def test_nodes_beyond_the_list_are_said_to_be_like_those_on_it(place):
    listed(place, (1, 10), (1, 20))
    found = fleet(settings_of(place), nodes=3)
    assert (found.price_h, found.about) == (45, "as listed, and 1 more like them at their mean price")
    assert fleet(settings_of(place), nodes=1).price_h == 10


def test_seventy_two_billion_on_eight_ranks_are_planned_in_seconds(place):
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = fab(place, "--model", "qwen2.5-72b", "--card", "H20", "--nodes", "8")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "take: " in done.stdout
    assert spent.ru_utime + spent.ru_stime - children.ru_utime - children.ru_stime < 5


def test_a_recipe_that_leaves_all_to_the_plan_has_no_row_of_its_own(place):
    said = fab(place, "--model", "qwen2.5-7b", "--card", "A10").stdout
    assert "as is" not in said and "the recipe leaves all this to the plan of a start" in said


def test_a_card_without_bfloat16_is_said_to_want_another_number_type(place):
    words = ("--model", "qwen2.5-0.5b", "--card", "T4")
    assert (
        "T4 has no bfloat16: the table is as of float16, and a start needs --set dtype=float16"
        in fab(place, *words).stdout
    )
    assert "no bfloat16" not in fab(place, *words, "--set", "dtype=float16").stdout


def test_beside_a_plan_for_a_mixture_stands_that_it_is_slower_than_planned(place):
    done = fab(place, "--model", "qwen3-30b-a3b", "--card", "A10", "--nodes", "4", "--json")
    assert MIXTURES in json.loads(done.stdout)["notes"]


def test_json_says_the_same_and_what_is_not_known_is_null(place):
    done = fab(place, "--model", "qwen2.5-14b", "--card", "A10", "--nodes", "4", "--json")
    found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [option["strategy"] for option in found["options"]] == ["zero0", "zero1", "zero2", "zero3", "pipeline"]
    assert found["settings"] == {
        "strategy": "pipeline",
        "micro_batch": found["chosen"]["micro_batch"],
        "gradient_checkpointing": found["chosen"]["checkpointed"],
        "pipeline.stages": 4,
        **{f"pipeline.{key}": found["chosen"]["split"][key] for key in ("layers", "checkpointed", "held")},
    }
    assert sum(found["chosen"]["split"]["layers"]) == 48 and found["options"][0]["split"] is None
    assert (found["epochs"], found["steps"]) == (2.0, None)
    assert found["machines"]["ram_bytes"] is None and found["data"] is None and found["chosen"]["minutes"] is None
    assert found["as_it_stands"] is None, "the recipe leaves it all to the plan"
    assert [option["fits"] for option in found["options"]] == [False, False, False, True, True]
    assert found["four_bits"] is None, "a dense model in stages wins little by them"


def test_neither_torch_nor_the_clouds_sdk_is_imported_for_a_plan(place):
    code = (
        "import sys\n"
        "from inventory.settings import load_settings\n"
        "from training.laptop import plan_options, plan_view, start_run\n"
        "recipe = start_run.resolve_recipe('qwen2.5-7b', (), '')\n"
        "wish = plan_options.PlanWish(cards=('A10',))\n"
        "plan_view.print_plan(plan_options.plan_question(load_settings(), recipe, wish))\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'alibabacloud_tea_openapi'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert told.stdout.splitlines()[-1] == "[]"


def test_what_four_bits_would_win_is_said_with_the_plan_to_type_and_is_left_to_the_user(place):
    words = ("--model", "gpt-oss-20b", "--card", "A10", "--nodes", "4")
    done, found = fab(place, *words), json.loads(fab(place, *words, "--json").stdout)
    command = "fab plan --model gpt-oss-20b --nodes 4 --card A10 --set base_precision=nf4"
    exact, four = found["chosen"]["tokens_per_s"], found["four_bits"]["option"]["tokens_per_s"]
    said = f"in four bits a weight ({command}) zero0 would do {four:.0f} tokens/s instead of {exact:.0f}; that rounds"
    assert said in said_by(done) and "so another loss is learned, and is left to you: docs/training.md" in said_by(done)
    assert four > 10 * exact and found["four_bits"]["times_as_fast"] == pytest.approx(four / exact)
    assert (found["four_bits"]["set"], found["four_bits"]["command"]) == ("base_precision=nf4", command)
    assert found["chosen"]["strategy"] == "zero3" and "base_precision" not in found["settings"]
    asked = json.loads(fab(place, *command.split()[2:], "--json").stdout)
    assert asked["chosen"] == found["four_bits"]["option"] | {"fits": True} and asked["four_bits"] is None
    for named in ("base_precision=dtype", "strategy=zero3"):
        assert "in four bits a weight" not in fab(place, *words, "--set", named).stdout
    dense = fab(place, "--model", "qwen2.5-14b", "--card", "A10", "--nodes", "4")
    assert "take: pipeline" in dense.stdout and "four bits" not in dense.stdout


def test_of_a_hybrid_the_plan_says_what_it_does_not_count(place):
    words = ("--card", "A10", "--nodes", "4")
    note = once_a_sample("qwen3_5")
    assert "layers of a qwen3_5 that mix tokens by a convolution or a running state are called once a sample" in note
    done = fab(place, "--model", "qwen3.5-9b", *words)
    assert note in done.stdout.partition("computed, not measured")[2].splitlines(), "below the table"
    assert note in json.loads(fab(place, "--model", "qwen3.5-9b", *words, "--json").stdout)["notes"]
    assert "once a sample" not in fab(place, "--model", "gemma3-4b", *words).stdout


def test_every_type_whose_layers_mix_tokens_otherwise_is_called_so():
    for kind, settings in WRAPPERS.items():
        assert bool(once_a_sample(kind)) == (settings["text_config"]["model_type"] in HYBRIDS)
    shapes = [known_shape(load_recipe(name).base_model) for name in recipe_names()]
    assert {shape.kind for shape in shapes if once_a_sample(shape.kind)} == {
        shape.kind for shape in shapes if not all(layer.attention for layer in shape.kinds)
    }


def test_a_kind_of_card_that_is_left_empty_is_refused(place):
    done = fab(place, "--model", "qwen2.5-7b", "--card", "A10,", "--nodes", "2")
    assert done.returncode != 0 and "--card A10,: " in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
