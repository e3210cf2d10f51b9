"""`fab plan --rent`: what a cloud offers, which of it is shown, and what `--take` writes."""

from __future__ import annotations

import json
import re
import time
import tomllib
from dataclasses import replace

import pytest

from deploy.on_node.fetch_model import RESERVE_BYTES
from inventory.cloud import opening
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import InstanceType
from inventory.renting.types_on_offer import on_offer
from inventory.settings import SettingsError, load_settings
from tests.support.memory_cloud import MemoryCloud
from tests.support.memory_settings import MemorySettings
from tests.support.paper_cluster import PaperCluster
from tests.training.plan.test_measured import RUN
from training.cost.memory import SPARE
from training.cost.shape import PlanError
from training.laptop import rent_options, rent_view
from training.laptop.machines import named_cards
from training.laptop.plan_options import PlanWish
from training.models.names import load_recipe
from training.plan.calibration import measured_text
from training.plan.notes import MIXTURES
from training.run.folder import MEASURED
from training.run.launch import LaunchError
from training.text.counts import HOUR, bare

A10 = InstanceType("a10.small", 8, 30, 1, "NVIDIA A10", 24, 16)
A10_LARGE = InstanceType("a10.large", 16, 60, 1, "NVIDIA A10", 24, 16)
A100 = InstanceType("a100.one", 16, 125, 1, "NVIDIA A100", 80, 8)
A100_40 = InstanceType("a100.half", 12, 94, 1, "NVIDIA A100", 40, 4)
SLICE = InstanceType("a10.slice", 4, 15, 1, "NVIDIA A10", 4, 4, has_slices=True)
A800 = InstanceType("a800.one", 16, 125, 1, "NVIDIA A800", 80, 8)
L4 = InstanceType("l4.one", 8, 60, 1, "NVIDIA L4", 24, 8)
T4 = InstanceType("t4.one", 4, 15, 1, "NVIDIA T4", 16, 4)
V100 = InstanceType("v100.one", 12, 92, 1, "NVIDIA V100", 32, 5)
PRICES = [(A10, 11.73), (A10_LARGE, 12.4), (A100, 34.48), (A100_40, 30.0), (SLICE, 2.0), (T4, 3.0), (V100, 9.0)]
PLAIN = load_recipe("qwen2.5-14b")


@pytest.fixture
def cloud(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # nothing was measured here
    made = MemoryCloud(gpus=PRICES)
    monkeypatch.setitem(opening.OPENED_BY, "memory", lambda settings, record: made)
    return made


def settings_of(**table):
    return MemorySettings.model_validate({"name": "demo", "memory": {"types": ("a10.small",), **table}})


def looked(recipe=PLAIN, wish=None, **table):
    return rent_options.rent_choices(settings_of(**table), recipe, wish or PlanWish())


def named(choices):
    return [(way.offered.type_name, way.offered.nodes) for way in choices.rows]


def test_one_a100_is_found_where_cluster_toml_says_four_a10(cloud, capsys):
    choices = looked()
    assert named(choices)[0] == ("a100.one", 1)
    now = choices.as_it_stands
    assert (now.offered.type_name, now.offered.nodes) == ("a10.small", 4)
    assert choices.rows[0].money == pytest.approx(0.6 * now.money, rel=0.01) and choices.rows[0].seconds < now.seconds
    rent_view.print_choices(choices)
    said = capsys.readouterr().out
    assert "1 cheapest" in said and "fastest" in said and "as is" in said
    assert (
        "1 x a100.one (NVIDIA A100): 59% of what 4 x a10.small (NVIDIA A10) cost, which cluster.toml says now" in said
    )
    assert "150 TFLOP/s of NVIDIA A100, from a table: not measured on these cards" in said


def test_of_a_kind_of_cards_the_smallest_machine_is_asked_for_its_price_and_the_larger_ones_are_for_later(cloud):
    offers, said = on_offer(cloud, settings_of(), lambda kind: "A10" in kind.gpu_spec.split())
    assert {each.machine.name: each.also for each in offers} == {"a10.small": ("a10.large",)}
    assert said == () and all(each.in_stock and each.spot and each.advice for each in offers)


def test_slices_old_cards_and_cards_without_bfloat16_are_left_out(cloud):
    assert set(looked().offers) == {"a10.small", "a100.one", "a100.half"}
    half = load_recipe("qwen2.5-14b", {"dtype": "float16"})
    assert set(looked(half).offers) == {"a10.small", "a100.one", "a100.half", "t4.one"}


def test_a_card_with_less_memory_than_usual_is_planned_with_what_it_has(cloud):
    cards = {way.offered.type_name: way.offered.machines for way in looked().ways}
    assert cards["a100.half"].card == "NVIDIA A100 40GB"
    assert cards["a100.half"].card_bytes == 40 * 2**30 and cards["a100.one"].card == "NVIDIA A100"


def test_a_kind_of_card_and_a_number_of_machines_narrow_the_choice(cloud):
    choices = looked(wish=PlanWish(cards=("A100",), nodes=2))
    assert {(way.offered.type_name, way.offered.nodes) for way in choices.ways} == {("a100.one", 2), ("a100.half", 2)}
    with pytest.raises(PlanError, match=r"^--card L20: no machine with such cards is offered$"):
        looked(wish=PlanWish(cards=("L20",)))
    with pytest.raises(LaunchError, match=r"^--card Z80: nothing is known of it; known: H200, "):
        looked(wish=PlanWish(cards=named_cards("Z80")))


def more_types(cloud, *types):
    for machine, price in types:
        cloud.gpus[machine.name], cloud.prices_h[machine.name] = machine, price


def test_an_a800_is_as_fast_as_an_a100_and_kinds_nobody_knows_the_speed_of_are_named(cloud, capsys):
    more_types(cloud, (A800, 20.0), (L4, 5.1))
    choices = looked()
    assert named(choices)[0] == ("a800.one", 1)
    note = "left out, as nobody knows how fast they are: NVIDIA L4 (from "
    assert next(line for line in choices.notes if "nobody knows" in line).startswith(note)
    rent_view.print_choices(choices)
    said = " ".join(capsys.readouterr().out.split())
    assert note in said and re.search(r"NVIDIA L4 \(from \d+\.\d\d( \w+)? an hour\)", said)
    alone = looked(wish=PlanWish(cards=("L4",)))
    assert {name for name, _ in named(alone)} == {"l4.one"} and not any("left out" in line for line in alone.notes)


def test_a_card_that_is_not_known_here_has_the_memory_that_the_cloud_says(cloud):
    more_types(cloud, (InstanceType("z80.one", 8, 60, 1, "NVIDIA Z80", 96, 8), 9.0))
    choices = looked(types=("z80.one",))
    (note,) = [line for line in choices.notes if line.startswith("left out")]
    assert note.startswith("left out, as nobody knows how fast they are: NVIDIA Z80 96GB (from ")
    asked = looked(types=("z80.one",), wish=PlanWish(cards=("Z80 96GB",)))
    assert {name for name, _ in named(asked)} == {"z80.one"}


def test_listed_machines_that_differ_are_not_called_too_small_where_more_are_cheaper(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("")
    first, second = NODE.format(k=1).replace("11.73", "20"), NODE.format(k=2).replace("11.73", "2")
    (toml := tmp_path / "cluster.toml").write_text(LISTED.format(folder=tmp_path) + first + second)
    choices = rent_options.rent_choices(load_settings(toml), load_recipe("qwen2.5-3b"), PlanWish(cards=("A10",)))
    assert {way.offered.nodes: way.offered.machines.price_h for way in choices.ways} == {1: 20, 2: 22}
    rent_view.print_choices(choices)
    said = capsys.readouterr().out
    assert "too small" not in said and "of a type" not in said


def test_several_machines_whose_network_nobody_knows_are_said_to_be_left_out(cloud):
    more_types(cloud, (replace(A800, line_rate_gbps=0), 20.0))
    assert any(line.startswith("more than one machine each of NVIDIA A800 left out") for line in looked().notes)


def test_machines_without_a_time_are_shown_once_and_not_called_the_best(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("")
    measured_text = (
        LISTED.replace("line_rate_gbps = 16\n", "").format(folder=tmp_path) + NODE.format(k=1) + NODE.format(k=2)
    )
    (toml := tmp_path / "cluster.toml").write_text(measured_text)
    choices = rent_options.rent_choices(load_settings(toml), load_recipe("qwen2.5-14b"), PlanWish())
    assert named(choices) == [("listed", 2)]
    rent_view.print_choices(choices)
    said = capsys.readouterr().out
    assert "1 cheapest" not in said and "1 fastest" not in said and "left out" not in said
    assert "without a time: 2 x listed (A10), as nobody knows how fast their network is: --line-rate-gbps 16" in said


def test_of_rows_that_cost_as_much_the_fastest_is_called_the_cheapest(cloud):
    rows = looked(load_recipe("qwen2.5-3b"), PlanWish(cards=("A10",))).rows
    least = min(way.money for way in rows)
    found = rent_options.best(rows, "cheapest")
    assert found.money <= 1.03 * least
    assert all(way.seconds >= found.seconds for way in rows if way.money <= 1.03 * least)
    alike = [way for way in rows if way.money <= 1.03 * least]
    assert len(alike) > 1 and found is alike[-1]


def test_four_bits_are_offered_where_nothing_fits(cloud):
    with pytest.raises(PlanError, match=r"fits none of the machines there are; .* would fit .*base_precision=nf4"):
        looked(wish=PlanWish(cards=("A10",), nodes=1))


def test_a_data_disk_that_the_base_model_does_not_fit_is_said_and_is_not_taken(cloud, capsys, monkeypatch, tmp_path):
    large = load_recipe("qwen2.5-72b")
    choices = looked(large, data_disk_gib=120)
    said = "its files need 135.4 GiB on the data disk, memory.data_disk_gib = 120: with environment and checkpoints "
    (note,) = [line for line in choices.notes if line.startswith(said)]
    need = int(note.removeprefix(said))
    assert 150 <= need <= 200
    with pytest.raises(PlanError, match=r"^--take 1: its files need 135.4 GiB .*; set it, since prices are with"):
        rent_options.take(choices, "1")
    assert not any("data disk" in line for line in looked(large, data_disk_gib=need).notes)
    assert SPARE == RESERVE_BYTES


def test_more_ranks_than_a_step_has_rows_is_the_reason_that_is_said(cloud):
    said = r"^20 machines have 20 ranks, and a step only 16 rows for them \(global_batch = 16\): take fewer machines"
    with pytest.raises(PlanError, match=said):
        looked(load_recipe("qwen2.5-7b"), PlanWish(nodes=20))


def test_padded_rows_of_many_lengths_are_said_to_be_reckoned_at_worst(cloud, tmp_path, capsys):
    recipe = load_recipe("qwen2.5-7b", {"batching": "padded"})
    record = {"prompt": "What is this?", "completion": "It is something."}
    lines = [json.dumps(record)] * 50 + [json.dumps(record | {"completion": "long " * 5000})]
    (file := tmp_path / "data.jsonl").write_text("\n".join(lines))
    said = "padded rows: speed, time and money are at worst, as if every row were as long as the longest: 2048 tokens"
    rent_view.print_choices(looked(recipe, PlanWish(data=(str(file),))))
    assert said in " ".join(capsys.readouterr().out.split())
    file.write_text("\n".join(lines[:50]))
    rent_view.print_choices(looked(recipe, PlanWish(data=(str(file),))))
    assert "at worst" not in capsys.readouterr().out


def test_the_runs_that_rows_were_corrected_by_are_named(cloud, tmp_path, capsys):
    folder = tmp_path / "runs" / RUN.run_id
    folder.mkdir(parents=True)
    wish = PlanWish(cards=("A10",), nodes=4)
    before = looked(wish=wish).rows[0].option
    (folder / MEASURED).write_text(measured_text(RUN))
    choices = looked(wish=wish)
    assert choices.rows[0].option.step_s == pytest.approx(1.2 * before.step_s)
    rent_view.print_choices(choices)
    assert f"seconds of {before.strategy} x 1.20, as {RUN.run_id} took" in capsys.readouterr().out
    (folder / MEASURED).write_text(measured_text(replace(RUN, step_s=0.05, planned_step_s=0.0, model_step_s=0.0)))
    assert looked(wish=wish).rows[0].option.step_s == before.step_s, "too short to tell"
    assert capsys.readouterr().err == ""


def test_what_has_no_stock_gives_way_to_what_has(cloud, monkeypatch):
    stock = cloud.stock
    monkeypatch.setattr(
        cloud, "stock", lambda *a: tuple(s for s in stock(*a) if not s.instance_type.startswith("a100"))
    )
    assert {name for name, _ in named(looked())} == {"a10.small"}


def test_a_type_without_a_price_is_said_and_left_out(cloud, monkeypatch):
    price = cloud.price

    def refusing(launch):
        if launch.instance_type == "a100.one":
            raise CloudError("not sold today", Kind.PRICE, "NoPrice", "r")
        return price(launch)

    monkeypatch.setattr(cloud, "price", refusing)
    choices = looked()
    assert "a100.one" not in choices.offers
    assert any(note.startswith("no price for a100.one in nowhere-1") for note in choices.notes)


def test_each_type_is_asked_for_once_and_only_what_is_needed(cloud, monkeypatch):
    calls = []
    for name in ("types", "stock", "spot_market", "price", "image", "instances", "run"):
        real = getattr(cloud, name)
        monkeypatch.setattr(cloud, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    looked()
    assert sorted(calls) == sorted(["types", "stock", "spot_market", "image", *["price"] * 3])
    calls.clear()
    looked(spot="off")
    assert "spot_market" not in calls


@pytest.mark.parametrize(("recipe", "said"), [("qwen3-30b-a3b", True), ("qwen2.5-14b", False)])
def test_beside_machines_for_a_mixture_stands_that_it_is_slower_than_planned(cloud, recipe, said):
    assert (MIXTURES in looked(load_recipe(recipe)).notes) is said


def test_it_needs_no_five_seconds_of_its_own(cloud):
    began = time.process_time()
    rent_view.print_choices(looked())
    assert time.process_time() - began < 5


def test_json_says_the_same(cloud, capsys):
    choices = looked()
    rent_view.print_choices_json(choices)
    told = json.loads(capsys.readouterr().out)
    assert [(row["type"], row["nodes"]) for row in told["rows"]] == named(choices)
    first = told["rows"][0]
    assert first["money"] == pytest.approx(choices.rows[0].money) and first["settings"]["strategy"] == "zero0"
    assert first["machines"]["ram_bytes"] == 125 * 2**30 and first["advice"]["interruption_rate_percent"] == 1
    assert told["as_it_stands"]["nodes"] == 4 and told["made_up"] is False


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A cluster of the local cloud, whose GPU types are sold out but for those a test stocks."""
    monkeypatch.chdir(tmp_path)
    aliyun = '# all of it made up\ntypes = ["ecs.gn7i-c8g1.2xlarge"] # in order\nnodes = 4\n'
    with PaperCluster(tmp_path, monkeypatch, aliyun=aliyun) as cluster:
        monkeypatch.setenv("SPOTUNE_CLUSTER", str(cluster.toml))
        yield cluster


def chosen(local, model="qwen2.5-14b", **wish):
    return rent_options.rent_choices(local.settings, load_recipe(model), PlanWish(**wish))


def stocked(local, *types):
    for each in types:
        local.api.fault("DescribeAvailableResource", "stock", instance_type=each)
        local.cloud.stock(each, True)


def test_the_local_clouds_table_says_that_its_prices_are_made_up_and_what_has_no_stock(local, capsys):
    rent_view.print_choices(chosen(local))
    said = capsys.readouterr().out
    assert "prices and spot figures are made up" in said and re.search(r"x ecs\.gn7e-c16g1\.\d+xlarge, no stock", said)
    assert said.count("CNY") == 2 and "reclaimed" in said and said.count("million") == 2


def test_listed_types_that_compute_on_cpus_are_shown_without_times(local, capsys):
    local.write('types = ["ecs.local.small"]\nnodes = 2\n')
    choices = chosen(local, "tiny")
    (way,) = [way for way in choices.rows if way.offered.in_stock]
    assert (way.offered.type_name, way.offered.nodes, way.seconds) == ("ecs.local.small", 1, None)
    rent_view.print_choices(choices)
    assert "cheapest\n" not in capsys.readouterr().out and rent_options.best(choices.rows, "cheapest") is None
    rent_options.take(choices, str(1 + choices.rows.index(way)))
    own = load_settings(local.toml).rental
    assert (own.types, own.nodes) == (("ecs.local.small",), 1)
    with pytest.raises(PlanError, match=r"--take fastest: nobody knows how fast they are"):
        rent_options.take(choices, "fastest")


def test_what_is_taken_stands_in_cluster_toml_and_is_what_fab_up_then_wants(local, capsys):
    stocked(local, "ecs.gn7e-c16g1.4xlarge", "ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")
    choices = chosen(local)
    rent_options.take(choices, "cheapest")
    said = capsys.readouterr().out
    assert f'{local.toml}: types = ["ecs.gn7e-c16g1.4xlarge"] (was ["ecs.gn7i-c8g1.2xlarge"])' in said
    assert "nodes = 1 (was 4)" in said and said.endswith("next: fab up --dry\n")
    measured_text = local.toml.read_text()
    assert "# all of it made up" in measured_text and "# in order" in measured_text
    assert tomllib.loads(measured_text)["aliyun"]["types"] == ["ecs.gn7e-c16g1.4xlarge"]
    local.settings = load_settings(local.toml)
    assert local.plan(1).quotes[0].offer.instance_type == "ecs.gn7e-c16g1.4xlarge"
    rent_options.take(choices, "1")
    assert "already" in capsys.readouterr().out and local.toml.read_text() == measured_text


def test_a_taken_type_brings_the_larger_ones_in_stock_with_the_same_card(local):
    stocked(local, "ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")
    rent_options.take(chosen(local, "qwen2.5-7b"), "cheapest")
    assert load_settings(local.toml).rental.types == ("ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("9", r"--take 9: there is cheapest, fastest or 1 to \d$"),
        ("best", r"--take best: there is cheapest, fastest or 1 to \d$"),
        ("0", r"--take 0: there is "),
        ("1", r"--take 1: ecs\.\S+ is not in stock, fab up could not rent it$"),
        ("cheapest", r"--take cheapest: nothing is in stock$"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_nothing_is_written(local, which, said):
    before = local.toml.read_text()
    with pytest.raises(PlanError, match=said):
        rent_options.take(chosen(local), which)
    assert local.toml.read_text() == before


def test_a_budget_that_would_not_bear_it_keeps_the_file_as_it_is(local):
    stocked(local, "ecs.gn7e-c16g1.4xlarge")
    local.write(
        'types = ["ecs.gn7e-c16g1.4xlarge"]\nnodes = 1\nhours = 4\n'
        'spot = "price-limit"\nprice_limit = 20\nbudget = 100\n'
    )
    before = local.toml.read_text()
    with pytest.raises(SettingsError, match=r"aliyun\.budget: \d+ machines for 4 h at up to 20.00 an hour may cost"):
        rent_options.take(chosen(local), "fastest")
    assert local.toml.read_text() == before


LISTED = """\
name = "mine"
provider = "static"
[ssh]
key = "{folder}/key"
[network]
line_rate_gbps = 16
"""
NODE = '[[nodes]]\nname = "te{k}"\naddress = "203.0.113.{k}"\ncard = "A10"\nprice_per_hour = 11.73\ncurrency = "CNY"\n'


def test_listed_machines_get_the_same_table_and_nothing_is_asked_of_a_cloud(cloud, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("")
    toml = tmp_path / "cluster.toml"
    toml.write_text(LISTED.format(folder=tmp_path) + "".join(NODE.format(k=k) for k in (1, 2, 3, 4)))
    settings = load_settings(toml)
    choices = rent_options.rent_choices(settings, load_recipe("qwen2.5-3b"), PlanWish(cards=("A10",)))
    assert named(choices) == [("listed", 1), ("listed", 2), ("listed", 4)]
    rent_view.print_choices(choices)
    said = capsys.readouterr().out
    assert "4 x listed" in said and "more machines of one type save time, never money" in said
    assert "CNY a million tokens" in said and "reclaimed" not in said
    monkeypatch.setattr(rent_view, "cheaper_in_numbers", lambda ways: (ways[0], ways[-1]))
    rent_view.print_choices(choices)
    assert "not money" in capsys.readouterr().out
    with pytest.raises(PlanError, match=r"--take cheapest: the machines are listed, there is nothing to rent$"):
        rent_options.take(choices, "cheapest")
    with pytest.raises(PlanError, match=r"--nodes 5: 4 are listed$"):
        rent_options.rent_choices(settings, load_recipe("qwen2.5-7b"), PlanWish(cards=("A10",), nodes=5))
    toml.write_text(toml.read_text().replace('card = "A10"\n', ""))
    with pytest.raises(LaunchError, match=r"nothing says which cards te1 has.*--model qwen2.5-7b --card A10"):
        rent_options.rent_choices(load_settings(toml), load_recipe("qwen2.5-7b"), PlanWish())
    with pytest.raises(PlanError, match=r"^--price-per-hour is for listed machines"):
        looked(wish=PlanWish(price_per_hour=3.0))


def test_without_a_price_machines_are_compared_by_their_hours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("")
    node = NODE.partition("price_per_hour")[0]
    (toml := tmp_path / "cluster.toml").write_text(
        LISTED.format(folder=tmp_path) + "".join(node.format(k=k) for k in (1, 2, 3))
    )
    rent_view.print_choices(
        rent_options.rent_choices(load_settings(toml), load_recipe("qwen2.5-14b"), PlanWish(cards=("A10",)))
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "3 x listed (A10) take fewer machine-hours than 2 of them" in said and "cheaper than" not in said


def test_what_no_machine_can_make_of_a_model_is_no_question_of_its_size(cloud):
    with pytest.raises(PlanError, match=r"^qwen3\.6-35b-a3b: tuning = full: .* which knows more than text"):
        looked(load_recipe("qwen3.6-35b-a3b", {"tuning": "full"}))


def test_a_model_too_large_for_every_offer_is_said_to_be(cloud):
    with pytest.raises(PlanError, match=r"^qwen2\.5-72b fits none of the machines there are"):
        looked(load_recipe("qwen2.5-72b"), PlanWish(nodes=1))


def test_fab_plan_rent_prints_the_table_and_take_writes_the_file(local):
    stocked(local, "ecs.gn7e-c16g1.4xlarge")
    done = local.fab("plan", "--model", "qwen2.5-14b", "--rent", "--take", "cheapest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cheapest" in done.stdout and "1 x ecs.gn7e-c16g1.4xlarge" in done.stdout
    assert load_settings(local.toml).rental.types == ("ecs.gn7e-c16g1.4xlarge",)
    done = local.fab("plan", "--model", "qwen2.5-14b", "--rent", "--json", "--take", "cheapest")
    told = json.loads(done.stdout)
    assert "next: fab up --dry" in done.stderr
    assert told["rows"][0]["type"] == "ecs.gn7e-c16g1.4xlarge" and told["made_up"] is True


def test_take_without_rent_and_hours_with_it_are_refused_in_a_sentence(local):
    done = local.fab("plan", "--model", "qwen2.5-14b", "--take", "1")
    assert (done.returncode, done.stderr) == (2, "--take 1 is for --rent\n")
    done = local.fab("plan", "--model", "qwen2.5-14b", "--rent", "--hours", "2")
    assert done.returncode == 2 and done.stderr.startswith("--hours is for machines that are chosen")


def test_all_prices_of_a_row_are_of_all_its_machines(cloud):
    choices = looked()
    rows = [rent_view._cells(choices, "", way) for way in choices.rows]
    assert {way.offered.nodes for way in choices.rows} > {1}
    for way, cells in zip(choices.rows, rows, strict=True):
        offer = choices.offers[way.offered.type_name]
        hour, listed, spot = cells[-4:-1]
        assert hour == bare(way.offered.machines.price_h, per=HOUR)
        assert listed == bare(way.offered.nodes * offer.price.list, per=HOUR)
        assert spot == " to ".join(
            bare(way.offered.nodes * each, per=HOUR) for each in (offer.spot.low, offer.spot.high)
        )
