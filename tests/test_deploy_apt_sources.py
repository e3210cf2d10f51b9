from deploy.apt_sources import through_mirror

MIRROR = "https://mirrors.aliyun.com"


def test_the_distributions_archives_go_through_the_mirror():
    text = "deb http://a.example/ubuntu jammy main\ndeb http://s.example/ubuntu/ jammy main\n"
    assert through_mirror(text, MIRROR) == (f"deb {MIRROR}/ubuntu jammy main\ndeb {MIRROR}/ubuntu/ jammy main\n")


def test_deb822_sources_and_the_security_archive_too():
    text = "URIs: http://a.example/debian\nURIs: http://a.example/debian-security\n"
    assert through_mirror(text, MIRROR + "/") == f"URIs: {MIRROR}/debian\nURIs: {MIRROR}/debian-security\n"


def test_other_repositories_and_comments_stay():
    text = "# deb http://a.example/ubuntu x\ndeb https://nvidia.example/cuda/repos/ubuntu2204/x86_64/ /\n"
    assert through_mirror(text, MIRROR) == text


def test_doing_it_twice_changes_nothing():
    once = through_mirror("deb http://a.example/ubuntu jammy main\n", MIRROR)
    assert through_mirror(once, MIRROR) == once
