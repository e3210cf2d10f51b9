"""Proxies and certificates by the environment variables that other programs read."""

import os

import pytest

from training.models.hub import HubError, hub_at
from training.text import internet

HTTP, SOCKS = "http://127.0.0.1:9", "socks5h://127.0.0.1:9"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [*internet.CA_VARIABLES, *(each for each in os.environ if each.lower().endswith("_proxy"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, ""),
        ({"HTTPS_PROXY": "127.0.0.1:9"}, "127.0.0.1:9"),
        ({"ALL_PROXY": HTTP}, HTTP),
        ({"ALL_PROXY": HTTP, "https_proxy": "http://[::1]:9"}, "http://[::1]:9"),
        ({"HTTP_PROXY": HTTP}, ""),
    ],
)
def test_the_proxy_of_https_addresses_is_also_that_of_all(monkeypatch, variables, proxy):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert internet.proxy() == proxy


@pytest.mark.parametrize("value", ["socks://127.0.0.1:7891/", SOCKS, "SOCKS5://127.0.0.1:9", "ss://127.0.0.1"])
@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy", "HTTP_PROXY"])
def test_a_proxy_that_cannot_be_used_is_named_before_anything_is_asked(monkeypatch, name, value):
    monkeypatch.setattr(internet, "find_spec", lambda _: None)
    monkeypatch.setenv(name, value)
    with pytest.raises(HubError, match=name.upper()):
        hub_at("", None, "").told(pytest.fail)


def test_with_the_packages_a_socks_proxy_is_used(monkeypatch):
    monkeypatch.setattr(internet, "find_spec", lambda _: True)
    monkeypatch.setenv("ALL_PROXY", SOCKS)
    assert internet.proxy() == SOCKS


def test_a_host_that_no_proxy_names_needs_no_proxy_that_can_be_used(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "ss://127.0.0.1")
    monkeypatch.setenv("NO_PROXY", "localhost,.example")
    assert internet.proxy("ecs.example") == ""
    with pytest.raises(internet.InternetError):
        internet.proxy("ecs.another")


@pytest.mark.parametrize("name", internet.CA_VARIABLES)
def test_a_companys_certificates_are_taken_by_each_variable_and_must_be_there(monkeypatch, tmp_path, name):
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.setenv(name, str(tmp_path / "ca.pem"))
    hub = hub_at("", None, "")
    with pytest.raises(HubError, match=name):
        hub.asked(pytest.fail)
    (tmp_path / "ca.pem").touch()
    assert hub.asked(lambda _: os.environ["SSL_CERT_FILE"]) == internet.ca_bundle() == str(tmp_path / "ca.pem")


@pytest.mark.parametrize("name", internet.CA_VARIABLES)
def test_certificates_may_be_a_folder_of_them(monkeypatch, tmp_path, name):
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.setenv("SSL_CERT_DIR", "")
    monkeypatch.setenv(name, str(tmp_path))
    assert internet.ca_bundle() == str(tmp_path)
    read = hub_at("", None, "").asked(lambda _: (os.environ.get("SSL_CERT_FILE", ""), os.environ["SSL_CERT_DIR"]))
    assert read == ("", str(tmp_path))
