"""Keys written into cluster.toml: what else stands there stays, comments too."""

from __future__ import annotations

from pathlib import Path

import pytest

from inventory.cluster_file import set_values
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
    assert [line for line in lines if "types = [" not in line] == [
        "nodes = 1" if line == "nodes = 4" else line for line in before.splitlines() if "types = [" not in line
    ]


def test_writing_the_same_again_changes_nothing_not_even_the_file(shipped):
    set_values(shipped, "aliyun", TAKEN)
    text, at = shipped.read_text(), shipped.stat()
    assert set_values(shipped, "aliyun", TAKEN) == ()
    assert shipped.read_text() == text and shipped.stat().st_ino == at.st_ino


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[aliyun]\nnodes = 4  # one\nhours = 2\n", "[aliyun]\nnodes = 12  # one\nhours = 2\n"),
        ("[aliyun]\nhours = 2\n\n[models]\nnames = []\n", "[aliyun]\nhours = 2\nnodes = 12\n\n[models]\nnames = []\n"),
        ('name = "a"\n[models]\nnames = ["tiny"]', 'name = "a"\n[models]\nnames = ["tiny"]\n[aliyun]\nnodes = 12\n'),
        (
            "[aliyun]\nhours = 2  # how long\n\n# --- models ---\n[models]\nnames = []\n",
            "[aliyun]\nhours = 2  # how long\nnodes = 12\n\n# --- models ---\n[models]\nnames = []\n",
        ),
        ("[aliyun]\n# none yet\n[ssh]\n", "[aliyun]\nnodes = 12\n# none yet\n[ssh]\n"),
        ("aliyun = {nodes = 4}\n", "aliyun = {nodes = 12}\n"),
        ("aliyun.nodes = 4\n", "aliyun.nodes = 12\n"),
    ],
)
def test_a_key_is_written_where_its_table_is_and_all_else_stays(tmp_path, before, after):
    path = tmp_path / "cluster.toml"
    path.write_text(before)
    set_values(path, "aliyun", {"nodes": 12})
    assert path.read_text() == after


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
