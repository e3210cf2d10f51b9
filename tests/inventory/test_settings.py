"""cluster.toml: every mistake is said at once, with its key."""

import re
from pathlib import Path

import pytest

from inventory.cluster import load_cluster
from inventory.cluster_file import set_values
from inventory.settings import Python, Settings, SettingsError, load_settings

ROOT = Path(__file__).parents[2]


def load(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_settings(path)


def problems(tmp_path, text):
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    return str(caught.value).splitlines()


def key_file(tmp_path):
    key = tmp_path / "id"
    key.write_text("a private key")
    return key


def static(tmp_path, *nodes):
    tables = "".join(f"[[nodes]]\n{node}\n" for node in nodes)
    return f'provider = "static"\n[ssh]\nkey = "{key_file(tmp_path)}"\n{tables}'


def test_an_empty_file_gives_a_rented_cluster(tmp_path):
    assert load(tmp_path, "") == Settings()
    assert Settings().is_rented and not Settings().on_this_machine


def test_a_key_that_is_spelt_almost_right_names_the_one_that_was_probably_meant(tmp_path):
    told = problems(tmp_path, "[aliyun]\nnodse = 4\n[[nodes]]\nname = 'te1'\naddress = 'a1'\ngpu = 1\n[mirors]\n")
    for line in ("aliyun.nodse: unknown key; did you mean aliyun.nodes?", "mirors: unknown key; did you mean mirrors?"):
        assert any(each.endswith(line) for each in told), told
    assert any(each.endswith("nodes.te1.gpu: unknown key; did you mean nodes.gpus?") for each in told), told


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('name = "qwen"', "name"),
        ("budget = 300", "aliyun.budget"),
        ("nodes = 2", "aliyun.nodes"),
        ('provider = "static"', "provider"),
    ],
)
def test_a_key_behind_the_last_table_names_where_it_belongs(tmp_path, line, meant):
    (told,) = problems(tmp_path, f'[models]\nnames = ["tiny"]\n{line}\n')
    assert f"mean {meant}?" in told and "[models]" in told


@pytest.mark.parametrize("name", ["localhost", "localhost4", "ip6-localhost", "ip6-loopback", "broadcasthost"])
def test_a_name_that_every_machine_has_of_its_own_is_no_nodes(tmp_path, name):
    (told,) = problems(tmp_path, static(tmp_path, f'name = "{name}"\naddress = "203.0.113.7"'))
    assert f"nodes.{name}.name" in told


@pytest.mark.parametrize("path", [r"C:\Users\me\id", r"\\wsl$\me\id", r"D:\keys\id"])
def test_a_path_of_windows_belongs_in_single_quotes(tmp_path, path):
    (told,) = problems(tmp_path, f'[ssh]\nkey = "{path}"\n')
    settings = load(tmp_path, f"[ssh]\nkey = '{path}'\n")
    assert "line 2" in told and str(settings.ssh.key) == path


@pytest.mark.parametrize(
    ("url", "mirror"),
    [
        ("https://mirrors.example/ubuntu/", "https://mirrors.example"),
        ("http://mirrors.example//debian-security", "http://mirrors.example"),
        ("https://nexus.example/apt/", "https://nexus.example/apt"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
    ],
)
def test_a_mirror_of_apt_may_be_the_archives_own_folder(tmp_path, url, mirror):
    settings = load(tmp_path, f'[mirrors]\napt = "{url}"\n')
    assert settings.mirrors.apt == mirror


@pytest.mark.parametrize(
    "url", ["mirrors.example", "//mirrors.example", "https:/mirrors.example", "ftp://a.example", "https://a b"]
)
def test_a_mirror_of_apt_that_apt_cannot_read_is_refused(tmp_path, url):
    (told,) = problems(tmp_path, f'[mirrors]\napt = "{url}"\n')
    assert "mirrors.apt" in told


@pytest.mark.parametrize(
    ("url", "is_taken"),
    [
        ("https://user:word@mirror.example/simple", True),
        ("HTTPS://Mirror.example/simple", True),
        ("http://[::1]:8080/simple", True),
        ("http://127.0.0.2", True),
        ("http://localhost:x@evil.example/simple", False),
        ("http://127.0.0.1:8080@evil.example", False),
        ("http://evil.example\\\\@localhost/simple", False),
        ("http://127.0.0.1.evil.example", False),
        ("https://@/simple", False),
        ("https://:443/simple", False),
        ("https://[::1/simple", False),
        ("https://a.example/a b", False),
    ],
)
def test_a_mirror_is_judged_by_the_host_that_is_asked(tmp_path, url, is_taken):
    text = f'[mirrors]\npypi = "{url}"\n'
    if is_taken:
        assert load(tmp_path, text).mirrors.pypi == url
    else:
        assert "mirrors.pypi" in "".join(problems(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "Anna-1"', "name: one to eight small letters and digits are expected, a letter first, not 'Anna-1'"),
        ('name = "mine\\n"', "name: one to eight small letters and digits are expected, a letter first, not 'mine\\n'"),
        ('[aliyun]\nregion = "Hangzhou"', "aliyun.region: a region's id is expected, as cn-hangzhou, not 'Hangzhou'"),
        ('[aliyun]\nendpoint = "x"', "aliyun.endpoint: \"local\" or https://HOST is expected, or nothing, not 'x'"),
        ('[ssh]\nuser = "-oX"', "ssh.user: letters, digits and _ . @ + - are expected, a letter, digit or _ first"),
        ('[mirrors]\nhub = "http://a.cn"', "mirrors.hub: https://HOST... is expected (http:// on 127.0.0.1 only)"),
    ],
)
def test_a_text_of_the_wrong_signs_is_refused_in_words_and_no_pattern_is_shown(tmp_path, text, said):
    assert any(f": {said}" in line for line in problems(tmp_path, text)), problems(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("names = [“tiny”]", "“, which is none of TOML's: write \""),
        ("names ＝ []", "＝, which is none of TOML's: write ="),
        ("names = 【】", "【, which is none of TOML's: write ["),
    ],
)
def test_full_width_signs_are_named_where_they_stand_for_those_of_toml(tmp_path, line, sign):
    (told,) = problems(tmp_path, f'# 模型：“小”\nlanguage = "zh" # ，\n[models]\n{line}\n')
    assert told.endswith(f"; line 4 has the sign {sign}")


@pytest.mark.parametrize(
    "line", ['provider = "aliyun     # "aliyun": rented', 'region = "cn-hangzhou', "names = ['tiny]", 'names = ["tiny]']
)
def test_a_quote_that_nothing_closes_is_named_by_its_line(tmp_path, line):
    (told,) = problems(tmp_path, f'# nobody\'s "quote\nlanguage = "zh" # isn\'t\n{line}\n')
    assert told.endswith("; in line 3 a quote is opened and not closed"), told


def test_full_width_signs_in_texts_and_comments_are_nobodys_mistake(tmp_path):
    (told,) = problems(tmp_path, '# 模型：“小”\n[models]\nnames = ["模型：“小”"] # ，\nx y\n')
    assert "not valid TOML" in told and "which is none of TOML's" not in told


def test_all_mistakes_are_reported_at_once_each_with_its_key(tmp_path):
    local = '[local]\nwait_factor = "much"\nsubnet = "10.0.0.300/24"'
    told = problems(tmp_path, f'name = "Too_Long_Name"\ncolour = 1\n{local}')
    assert len(told) == 4
    for key in ("name", "colour: unknown key", "local.wait_factor", "local.subnet"):
        assert any(key in line for line in told), key


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[local]\nsubnet = "10.213.77.0/33"',
            "local.subnet: a network by its first address and its length is expected, such as 10.213.77.0/24, not "
            "'10.213.77.0/33'",
        ),
        (
            '[aliyun]\nssh_from = ["everywhere"]',
            "aliyun.ssh_from.0: an address or a network is expected, such as 203.0.113.7 or 203.0.113.0/24, not "
            "'everywhere'",
        ),
        (
            '[local]\nmetadata_address = "100.100"',
            "local.metadata_address: an IP address is expected, such as 192.0.2.7, not '100.100'",
        ),
    ],
)
def test_a_text_that_is_no_address_is_said_in_one_sentence_with_one_that_is(tmp_path, text, told):
    (line,) = problems(tmp_path, text)
    assert line.endswith(f": {told}")


def test_contradictions_are_told_beside_keys_that_cannot_be_read(tmp_path):
    node = 'name = "te1"\naddress = "192.0.2.1"'
    text = static(tmp_path, node, f'{node}\ngpus = "two"').replace("[ssh]", 'colour = 1\n[ssh]\nport = "22"')
    told = [line.split(": ", 1)[1] for line in problems(tmp_path, text)]
    starts = ("ssh.port:", "nodes.te1.gpus:", "colour: unknown key", "nodes.name: 'te1' is listed 2 times")
    starts += ("nodes.address:", "nodes.private_address:")
    assert [line for line in told if not line.startswith(starts)] == []
    assert len(told) == len(starts)


@pytest.mark.parametrize(
    ("text", "contradiction"),
    [
        ('colour = 1\n[[nodes]]\nname = "te1"', 'read only with provider = "static"'),
        ('colour = 1\nprovider = "static"', "at least one [[nodes]]"),
    ],
)
def test_an_unknown_key_hides_no_contradiction(tmp_path, text, contradiction):
    told = problems(tmp_path, text)
    assert any("colour: unknown key" in line for line in told)
    assert any(contradiction in line for line in told)


def test_a_key_that_cannot_be_read_is_not_taken_for_its_default(tmp_path):
    text = static(tmp_path, 'name = "te1"\naddress = "192.0.2.1"')
    told = problems(tmp_path, text.replace(f'"{tmp_path / "id"}"', "7"))
    assert len(told) == 1 and "ssh.key" in told[0] and "not 7" in told[0]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[local]\nnodes = "3"', "local.nodes"),
        ("[local]\nnodes = 3.0", "local.nodes"),
        ('[ssh]\nport = "22"', "ssh.port"),
        ('[driver]\nreboot = "no"', "driver.reboot"),
        ("[driver]\nreboot = 1", "driver.reboot"),
        ("[driver]\nbranch = true", "driver.branch"),
        ('[network]\nline_rate_gbps = "10"', "network.line_rate_gbps"),
        ("[network]\nline_rate_gbps = inf", "network.line_rate_gbps"),
        ("[models]\nnames = [1]", "models.names.0"),
        ('[models]\nnames = "tiny"', "models.names"),
        ("ssh = 3", "ssh"),
        ('[ssh]\nkey = "~nobody-of-that-name/id"', "ssh.key"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path, text, key):
    (line,) = problems(tmp_path, text)
    assert f": {key}: " in line


def test_a_node_without_gpus_has_no_kind_of_card(tmp_path):
    node = 'name = "te1"\naddress = "192.0.2.1"\ngpus = 0\ncard = "A10"'
    (line,) = problems(tmp_path, static(tmp_path, node))
    assert "nodes.card: te1 has gpus = 0, and says card = 'A10'" in line


def test_a_boolean_is_no_number_of_gpus(tmp_path):
    (line,) = problems(tmp_path, static(tmp_path, 'name = "te1"\naddress = "192.0.2.1"\ngpus = true'))
    assert "nodes.te1.gpus" in line


@pytest.mark.parametrize(
    "address",
    ["-oProxyCommand=touch x", "-v", "gpu example", "gpu\\u0007", "", "192.0.2.1:22", "gpu:22", "root@a"],
)
def test_an_address_has_no_port_and_cannot_become_an_option_of_ssh(tmp_path, address):
    node = f'name = "te1"\naddress = "{address}"\nprivate_address = "10.0.0.1"'
    (line,) = problems(tmp_path, static(tmp_path, node))
    assert "nodes.te1.address" in line and "user and port" in line


@pytest.mark.parametrize("user", ["-oProxyCommand=x", "ro ot", "root\\n", ""])
def test_a_user_cannot_become_an_option_of_ssh(tmp_path, user):
    (line,) = problems(tmp_path, f'[ssh]\nuser = "{user}"')
    assert "ssh.user" in line
    node = f'name = "te1"\naddress = "192.0.2.1"\nuser = "{user}"'
    (line,) = problems(tmp_path, static(tmp_path, node))
    assert "nodes.te1.user" in line


def test_the_file_of_the_checkout_says_every_default_of_its_tables():
    text = (ROOT / "cluster.toml").read_text(encoding="utf-8")
    assert load_settings(ROOT / "cluster.toml") == Settings(aliyun={"endpoint": "local"})
    for key in Python.model_fields:
        assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key


def test_the_line_rate_is_a_number_of_gbit(tmp_path):
    assert load(tmp_path, "").network.line_rate_gbps == 0
    assert load(tmp_path, "[network]\nline_rate_gbps = 25").network.line_rate_gbps == 25.0


def test_a_wrong_value_is_shown(tmp_path):
    assert "not 999" in problems(tmp_path, "[aliyun]\nnodes = 999")[0]


def test_broken_toml_is_one_sentence(tmp_path):
    (line,) = problems(tmp_path, "name = ")
    assert "not valid TOML" in line


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "cluster.toml")


def test_static_without_nodes_says_what_is_missing(tmp_path):
    (line,) = problems(tmp_path, static(tmp_path))
    assert "at least one [[nodes]]" in line


def test_nodes_beside_the_local_cloud_are_a_contradiction(tmp_path):
    (line,) = problems(tmp_path, '[[nodes]]\nname = "te1"\naddress = "192.0.2.1"')
    assert "nodes" in line and 'provider = "static"' in line


def test_every_duplicate_is_named(tmp_path):
    node = 'name = "te1"\naddress = "192.0.2.1"'
    told = problems(tmp_path, static(tmp_path, node, node))
    assert [line.split(": ")[1] for line in told] == ["nodes.name", "nodes.address", "nodes.private_address"]
    assert all("2 times" in line for line in told)


def test_one_address_with_two_ports_is_two_machines(tmp_path):
    first = 'name = "te1"\naddress = "192.0.2.1"\nport = 2201\nprivate_address = "10.0.0.1"'
    second = 'name = "te2"\naddress = "192.0.2.1"\nport = 2202\nprivate_address = "10.0.0.2"'
    assert [n.port for n in load(tmp_path, static(tmp_path, first, second)).nodes] == [2201, 2202]


def test_what_keeps_machines_from_being_reached_is_said_where_they_are_to_be_and_only_there(tmp_path):
    text = static(tmp_path, 'name = "te1"\naddress = "gpu.example"')
    text = text.replace(f"{tmp_path}/id", f"{tmp_path}/我的 id")
    assert load(tmp_path, text).nodes[0].address == "gpu.example"
    with pytest.raises(SettingsError) as told:
        load_cluster(tmp_path / "cluster.toml")
    key, address = str(told.value).splitlines()
    assert "ssh.key" in key and key.endswith(f"ssh-keygen -t ed25519 -f '{tmp_path}/我的 id'")
    assert "nodes.private_address" in address and "te1" in address


def test_the_china_preset_can_be_overridden_key_by_key(tmp_path):
    mirrors = load(tmp_path, '[mirrors]\npreset = "china"\napt = "https://apt.example"').mirrors.resolved()
    assert mirrors.apt == "https://apt.example"
    assert mirrors.hub == "https://hf-mirror.com"


def test_auto_is_venv_and_cpu_on_local_hosts_conda_and_cuda_elsewhere(tmp_path):
    local = load(tmp_path, '[aliyun]\nendpoint = "local"')
    rented = load(tmp_path, static(tmp_path, 'name = "te1"\naddress = "192.0.2.1"'))
    assert (local.python_provider, local.torch_flavour) == ("venv", "cpu")
    assert (rented.python_provider, rented.torch_flavour) == ("conda", "cuda")


def test_prices_of_static_nodes_are_in_one_currency(tmp_path):
    nodes = [("te1", "10.0.0.1", "CNY"), ("te2", "10.0.0.2", "USD")]
    text = f'provider = "static"\n[ssh]\nkey = "{key_file(tmp_path)}"\n' + "".join(
        f'[[nodes]]\nname = "{n}"\naddress = "{a}"\nprice_per_hour = 8.5\ncurrency = "{c}"\n' for n, a, c in nodes
    )
    (line,) = problems(tmp_path, text)
    assert "nodes.currency: CNY, USD" in line
    assert [n.price_per_hour for n in load(tmp_path, text.replace("USD", "CNY")).nodes] == [8.5, 8.5]


CHINESE = """name = "abc"  # 我的集群，一共四台机器
[aliyun]
nodes = 4  # 每台一张卡
"""


def test_the_mark_that_notepad_puts_before_a_file_is_no_mistake(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CHINESE, encoding="utf-8-sig")
    assert load_settings(path).rental.nodes == 4
    set_values(path, "aliyun", {"nodes": 2})
    assert load_settings(path).rental.nodes == 2 and "每台一张卡" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "codec", "name"),
    [
        (CHINESE, "gbk", "GB18030"),
        (CHINESE, "utf-16", "UTF-16"),
        (CHINESE, "utf-16-le", "UTF-16LE"),
        ("name = 'abc'\n", "utf-16-le", "UTF-16LE"),
    ],
)
def test_a_file_in_another_encoding_is_named_with_the_command_that_converts_it(tmp_path, text, codec, name):
    path = tmp_path / "cluster.toml"
    path.write_bytes(text.encode(codec))
    for read in (lambda: load_settings(path), lambda: set_values(path, "aliyun", {"nodes": 2})):
        with pytest.raises(SettingsError, match=rf"not UTF-8; it .* {name}.*: iconv -f {name} -t UTF-8 "):
            read()


def test_a_broken_byte_is_said_plainly(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"name = 'a\xff'\n")
    with pytest.raises(SettingsError, match=r"cluster\.toml: not UTF-8, .*save it as UTF-8"):
        load_settings(path)
