"""`fab keep --install`: the unit that systemd gets, and what a service has of the terminal it was made in."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from snapshots.service import (
    KeeperService,
    ServiceError,
    install,
    note_orders,
    orders_left,
    service_of,
    try_environment,
)
from tests.support.user_services import stand_in

RUN = "tiny-20260101-000000"
ODD = 'a "q" $HOME \\ 100%'


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """The folder of the stand-in."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state" / "spotune" / "clusters" / "demo").mkdir(parents=True)
    with stand_in(tmp_path / "bin") as folder:
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield folder


def service(checkout, **environment):
    return KeeperService("demo", RUN, 2, 4, True, checkout, environment)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_understands_the_unit_whatever_is_in_paths_and_variables(tmp_path):
    (checkout := tmp_path / "my 100% work").mkdir()
    unit = service(checkout, PATH="/usr/bin:/bin", ODD=ODD)
    assert unit.command[-1] == "--list-price"
    (file := tmp_path / unit.name).write_text(unit.unit)
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["systemd-analyze", "verify", "--user", file], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_key_of_a_cloud_and_no_address_of_a_notification_is_in_the_unit(tmp_path, monkeypatch):
    for name in ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "SPOTUNE_NOTIFY", "HF_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    monkeypatch.setenv("SPOTUNE_CLUSTER", "cluster.toml")
    unit = service_of("demo", RUN, 2, 4, list_price=False)
    assert "s3cret" not in unit.unit
    assert unit.environment["HTTPS_PROXY"] == os.environ["HTTPS_PROXY"]
    assert unit.environment["SPOTUNE_CLUSTER"] == str(Path("cluster.toml").resolve())
    with pytest.raises(ServiceError):  # it would never notify anybody
        try_environment(unit, ["notify"])


def test_the_service_is_installed_for_its_owner_alone_and_started(systemd, tmp_path):
    lines = []
    install(service(tmp_path), lines.append)
    (file,) = (tmp_path / "config" / "systemd" / "user").iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == ("spotune-keep-demo.service", 0o600)
    calls = (systemd / "calls").read_text().splitlines()
    assert calls == ["--user daemon-reload"] * 2 + [f"--user enable --now {file}"]
    assert "enable-linger" in lines[-1]


@pytest.mark.parametrize("there", [True, False])
def test_without_systemd_nothing_is_written(systemd, tmp_path, monkeypatch, there):
    (systemd / "broken").touch()
    if not there:
        monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError):
        install(service(tmp_path), pytest.fail)
    assert not (tmp_path / "config").exists()


def test_a_service_that_begins_again_orders_no_more_than_was_agreed(systemd, tmp_path):
    assert orders_left("demo", RUN, 4) == 4
    note_orders("demo", RUN, 1)
    assert [orders_left("demo", run, 4) for run in (RUN, "tiny-20260202-000000")] == [1, 4]
    install(service(tmp_path), lambda line: None)
    assert orders_left("demo", RUN, 4) == 4


def test_what_a_service_could_not_do_is_said_before_it_is_one(tmp_path, monkeypatch):
    (toml := tmp_path / "cluster.toml").write_text('provider = "aliyun"\n[aliyun]\nregion = 3\n')
    carried = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SPOTUNE_CLUSTER": str(toml)}
    checkout = Path(__file__).parents[2]
    with pytest.raises(ServiceError, match=r"aliyun\.region"):
        try_environment(service(checkout, **carried), ["cost"])
    toml.write_text("")
    monkeypatch.delenv("SPOTUNE_NOTIFY")
    try_environment(service(checkout, **carried), ["notify"])
    monkeypatch.setattr("snapshots.service.TRY_S", 0.01)
    with pytest.raises(ServiceError):
        try_environment(service(checkout, **carried), ["notify"])
