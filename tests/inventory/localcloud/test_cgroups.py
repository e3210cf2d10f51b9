"""The processes of a host are found while its groups come and go: sessions end, services start."""

import threading
import time

import pytest

from inventory.localcloud import inside

LOOKS_S = 1.0


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A host's group in a tree of plain folders, with a first process."""
    monkeypatch.setattr(inside, "_all_roots", lambda: (tmp_path,))
    scope = tmp_path / "host" / "payload" / "init.scope"
    scope.mkdir(parents=True)
    (scope / "cgroup.procs").write_text("41\n0\n42\n")
    return tmp_path


def test_groups_that_come_and_go_hide_no_process(tree):
    """A look over a tree is not at one moment; Path.rglob raises where a folder went since it was listed."""
    ended = threading.Event()

    def sessions():
        while not ended.is_set():
            folders = [tree / "host" / "payload" / "user.slice" / f"session-{number}.scope" for number in range(20)]
            for folder in folders:
                (folder / "inner").mkdir(parents=True, exist_ok=True)
            for folder in folders:
                (folder / "inner").rmdir()
                folder.rmdir()

    thread = threading.Thread(target=sessions)
    thread.start()
    try:
        until = time.monotonic() + LOOKS_S
        while time.monotonic() < until:
            assert inside.pids("host") == {41, 42}
    finally:
        ended.set()
        thread.join()


def test_a_group_is_removed_with_those_below_it_and_what_is_gone_is_no_error(tree):
    (tree / "host" / "payload" / "init.scope" / "cgroup.procs").unlink()
    inside.remove("host")
    assert not (tree / "host").exists()
    inside.remove("host")
    assert inside.pids("host") == set()
