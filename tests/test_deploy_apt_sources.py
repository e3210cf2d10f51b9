import pytest

from deploy.apt_sources import through_mirror

MIRROR = "https://mirrors.aliyun.com"


def test_the_distributions_archives_go_through_the_mirror():
    text = "deb http://archive.ubuntu.com/ubuntu jammy main\ndeb http://security.ubuntu.com/ubuntu/ jammy main\n"
    assert through_mirror(text, MIRROR) == (f"deb {MIRROR}/ubuntu jammy main\ndeb {MIRROR}/ubuntu/ jammy main\n")


def test_deb822_sources_and_the_security_archive_too():
    text = "URIs: http://ftp.debian.org/debian\nURIs: https://security.debian.org/debian-security\n"
    assert through_mirror(text, MIRROR + "/") == f"URIs: {MIRROR}/debian\nURIs: {MIRROR}/debian-security\n"


def test_other_repositories_and_comments_stay():
    text = "# deb http://archive.ubuntu.com/ubuntu x\ndeb http://nvidia.example/cuda/repos/ubuntu2204/x86_64/ /\n"
    assert through_mirror(text, MIRROR) == text


@pytest.mark.parametrize("host", ["de.archive.ubuntu.com", "mirrors.cloud.aliyuncs.com", "mirror.corp.example:8080"])
def test_whoever_serves_the_distributions_archives(host):
    told = through_mirror(f"URIs: http://{host}/ubuntu/ http://{host}/ubuntu", MIRROR)
    assert told == f"URIs: {MIRROR}/ubuntu/ {MIRROR}/ubuntu"


@pytest.mark.parametrize(
    "place",
    [
        "packages.microsoft.com/ubuntu/22.04/prod",
        "repos.influxdata.com/debian",
        "archive.canonical.com/ubuntu",
        "apt.corp.example/ubuntu/internal",
        "ppa.launchpadcontent.net/deadsnakes/ppa/ubuntu",
        "mirror.corp.example/ubuntu/internal",
        "ports.ubuntu.com/ubuntu-ports",
        "esm.ubuntu.com/apps/ubuntu",
    ],
)
def test_another_vendors_repository_stays(place):
    for line in (f"deb [arch=amd64] https://{place} jammy main", f"URIs: https://{place}/"):
        assert through_mirror(line, MIRROR) == line


def test_doing_it_twice_changes_nothing():
    once = through_mirror("deb http://archive.ubuntu.com/ubuntu jammy main\n", MIRROR)
    assert through_mirror(once, MIRROR) == once
