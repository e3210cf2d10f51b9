"""[aliyun] in cluster.toml: what does not fit together is said before anything is asked of a cloud."""

import re
import tomllib
from pathlib import Path

import pytest

from inventory.aliyun_settings import Aliyun
from inventory.settings import Settings, SettingsError, load_settings

ROOT = Path(__file__).parents[3]


def load(tmp_path, table):
    path = tmp_path / "cluster.toml"
    path.write_text(f'provider = "aliyun"\n[aliyun]\n{table}\n')
    return load_settings(path)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('spot = "price-limit"', "aliyun.price_limit: .* needs the most"),
        ("price_limit = 3.5", "aliyun.price_limit: 3.5 is read only with"),
        ('spot = "price-limit"\nprice_limit = 1.2345', "three decimals"),
        (
            'spot = "price-limit"\nprice_limit = 10\nnodes = 4\nhours = 4\nbudget = 100',
            "aliyun.budget: 4 machines for 4 h at up to 10.00 an hour may cost 160.00, more than 100.00",
        ),
        ('performance_level = "PL1"\ndisk_category = "cloud_auto"', "aliyun.performance_level: only cloud_essd"),
        ('performance_level = "PL3"', "aliyun.data_disk_gib: a disk of PL3 has at least 1261 GiB, not 120"),
        ("data_disk_gib = 12", "aliyun.data_disk_gib: a disk of PL1 has at least 20 GiB, not 12"),
        ('zones = ["cn-shanghai-b"]', "aliyun.zones: 'cn-shanghai-b' is not in aliyun.region"),
        (
            'endpoint = "local"\nregion = "cn-hangzou"',
            "aliyun.region: the cloud on this machine has no region 'cn-hangzou'; it has cn-qingdao, .*cn-hangzhou, ",
        ),
        ('types = ["a", "a"]', "aliyun.types: 'a' is listed 2 times"),
        ("types = []", "aliyun.types"),
        ('ssh_from = ["0.0.0.0/0"]', "that is everybody"),
        ('ssh_from = ["me"]', "aliyun.ssh_from.0"),
        ("public_mbps = 101", "aliyun.public_mbps: at most 100 is expected, not 101"),
        ('endpoint = "http://ecs.example.com"', "aliyun.endpoint"),
        ('endpoint = "http://127.0.0.1.example.com:80"', "aliyun.endpoint"),
        ("budget = -1", "aliyun.budget"),
        ('[[nodes]]\nname = "te1"', 'read only with provider = "static"'),
    ],
)
def test_a_contradiction_is_one_sentence_with_its_key(tmp_path, table, reason):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, table)
    assert any(re.search(reason, line) for line in str(caught.value).splitlines()), str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        "",
        'spot = "price-limit"\nprice_limit = 1.5\nbudget = 1000',
        'performance_level = "PL2"\ndata_disk_gib = 461',
        'disk_category = "cloud_auto"',
        'endpoint = "https://ecs.example.com"',
        'region = "cn-new-1"',
        'endpoint = "http://127.0.0.1:8123"',
        'region = "ap-southeast-5"\nzones = ["ap-southeast-5a", "ap-southeast-5b"]',
    ],
)
def test_what_fits_is_taken(tmp_path, table):
    assert load(tmp_path, table).provider == "aliyun"


def test_an_address_that_may_reach_ssh_is_a_network(tmp_path):
    assert load(tmp_path, 'ssh_from = ["203.0.113.7", "198.51.100.9/24"]').aliyun.ssh_from == (
        "203.0.113.7/32",
        "198.51.100.0/24",
    )


def test_the_file_of_the_checkout_says_every_key_with_its_default():
    text = (ROOT / "cluster.toml").read_text(encoding="utf-8")
    for key in Aliyun.model_fields:
        assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key
    assert load_settings(ROOT / "cluster.toml").aliyun == Aliyun(endpoint="local")


def test_without_one_line_the_file_of_the_checkout_rents_from_the_real_cloud(tmp_path):
    text = (ROOT / "cluster.toml").read_text(encoding="utf-8")
    real = tmp_path / "cluster.toml"
    real.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("endpoint")))
    assert load_settings(real) == Settings() and not Settings().on_this_machine
    shown = re.search(r"^# types = (\[.*?\])", text, re.MULTILINE)[1]
    assert tuple(tomllib.loads(f"types = {shown}")["types"]) == Aliyun().types


def test_the_cloud_on_this_machine_has_types_of_its_own_unless_others_are_asked_for(tmp_path):
    assert load(tmp_path, 'endpoint = "local"').aliyun.types == ("ecs.local.small",)
    assert load(tmp_path, 'endpoint = "local"\ntypes = ["ecs.local.medium"]').aliyun.types == ("ecs.local.medium",)
