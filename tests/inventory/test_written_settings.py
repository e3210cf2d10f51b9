"""Keys written into cluster.toml: what else stands there stays, comments too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from inventory.cluster_file import set_values, with_values
from inventory.settings import SettingsError, load_settings

SHIPPED = Path(__file__).parents[2] / "cluster.toml"
TAKEN = {"types": ["ecs.gn7e-c16g1.4xlarge"], "nodes": 1}


@pytest.fixture
def shipped(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(SHIPPED.read_text())
    return path


def test_the_shipped_file_gets_types_and_nodes_and_keeps_every_comment(shipped):
    before = shipped.read_text()
    said = set_values(shipped, "aliyun", TAKEN)
    assert said == ('types = ["ecs.gn7e-c16g1.4xlarge"] (was not said)', "nodes = 1 (was 4)")
    after = shipped.read_text()
    own = load_settings(shipped).rental
    assert (own.types, own.nodes) == (("ecs.gn7e-c16g1.4xlarge",), 1)
    assert set(before.splitlines()) - set(after.splitlines()) == {"nodes = 4"}
    assert set(after.splitlines()) - set(before.splitlines()) == {"nodes = 1", 'types = ["ecs.gn7e-c16g1.4xlarge"]'}
    lines = after.splitlines()
    place = lines.index('types = ["ecs.gn7e-c16g1.4xlarge"]')
    assert lines[place - 1].startswith("# types = "), "it stands below the comment that explains it"


def test_writing_the_same_again_changes_nothing_not_even_the_file(shipped):
    set_values(shipped, "aliyun", TAKEN)
    text, at = shipped.read_text(), shipped.stat()
    assert set_values(shipped, "aliyun", TAKEN) == ()
    assert shipped.read_text() == text and shipped.stat().st_ino == at.st_ino


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("nodes = 4   # of them, the first is the head\n", "# of them, the first is the head"),
        ("  nodes=4\n", ""),
        ("nodes = 4", ""),
    ],
)
def test_a_keys_own_comment_stays_behind_it(line, kept):
    new = with_values(f"[aliyun]\n{line}", "aliyun", {"nodes": 12})
    assert new.splitlines()[1].startswith("nodes = 12") and new.splitlines()[1].endswith(kept)
    assert tomllib.loads(new) == {"aliyun": {"nodes": 12}}


def test_a_comment_stays_in_its_column_where_there_is_room():
    text = "[aliyun]\nnodes = 4            # why\nhours = 4            # how long\n"
    assert with_values(text, "aliyun", {"nodes": 16}).splitlines()[1] == "nodes = 16           # why"


def test_comments_inside_a_list_stay_as_comments():
    text = '[aliyun]\ntypes = [\n  "ecs.a",  # the old ones\n  "ecs.b#1",\n]  # in order\nhours = 2\n'
    new = with_values(text, "aliyun", {"types": ["ecs.c"]})
    assert "the old ones" in new and "in order" in new and "hours = 2\n" in new
    assert tomllib.loads(new) == {"aliyun": {"types": ["ecs.c"], "hours": 2}}


def test_a_table_that_is_not_there_is_added_at_the_end():
    text = 'name = "mine"\n[models]\nnames = ["tiny"]'
    new = with_values(text, "aliyun", {"nodes": 2})
    assert new.startswith(text) and tomllib.loads(new)["aliyun"] == {"nodes": 2}


def test_a_key_of_the_same_name_in_another_table_is_left_alone():
    text = "[other]\nnodes = 7\n[aliyun]\nhours = 1\n[third]\nnodes = 9\n"
    assert tomllib.loads(with_values(text, "aliyun", {"nodes": 2})) == {
        "other": {"nodes": 7},
        "aliyun": {"nodes": 2, "hours": 1},
        "third": {"nodes": 9},
    }


@pytest.mark.parametrize("text", ["aliyun = {nodes = 4}\n", "aliyun.nodes = 4\n"])
def test_a_layout_that_is_not_understood_is_refused_with_what_to_write(text):
    with pytest.raises(SettingsError, match=r"cannot be changed from here; write into it: nodes = 2$"):
        with_values(text, "aliyun", {"nodes": 2})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": 0}, "aliyun.nodes: "),
        ({"types": []}, "aliyun.types: "),
        ({"types": ["ecs.a", "ecs.a"]}, "aliyun.types: 'ecs.a' is listed 2 times"),
        ({"nodes": 99}, "aliyun.budget: 99 machines for 4 h at up to 5.00 an hour may cost 1980.00, more than 100.00"),
    ],
)
def test_a_file_that_would_not_be_valid_any_more_is_not_written(tmp_path, values, said):
    path = tmp_path / "cluster.toml"
    path.write_text('[aliyun]\nspot = "price-limit"\nprice_limit = 5\nbudget = 100\nnodes = 4\n')
    before = path.read_text()
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        set_values(path, "aliyun", values)
    assert path.read_text() == before and [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]


def test_a_link_stays_one_and_its_files_mode_too(tmp_path, shipped):
    shipped.chmod(0o600)
    link = tmp_path / "link.toml"
    link.symlink_to(shipped)
    set_values(link, "aliyun", TAKEN)
    assert link.is_symlink() and shipped.stat().st_mode & 0o777 == 0o600
    assert load_settings(shipped).rental.nodes == 1
