"""Base models: the real `hf` client against a hub on loopback, and what a seal finds afterwards."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import fan_out, models
from deploy.models import HALF, FileSums, send_commands
from deploy.on_node import fetch_model
from tests.support.hub import COMMIT, Hub
from tests.support.paper_weights import write_weights
from training.models.folder import state_of
from training.models.hub import HubError, file_name, hub_at
from training.recipe.base import TINY, Base
from training.recipe.recipe import RecipeError

WEIGHTS = random.Random(0).randbytes(3_000_000)
FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
REPO = "acme/model"
TOOLS = "additional_chat_templates/tool_use.jinja"

pytestmark = pytest.mark.skipif(
    not Path(sys.executable).with_name("hf").exists(),
    reason="huggingface-hub's `hf` is not beside this python",
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({REPO: dict(FILES)}) as hub:
        yield hub


class _At(models.ModelFolder):
    """A base model that lies where the test wants it."""

    @property
    def path(self) -> str:
        return self.folder


def fetched(
    hub: Hub, folder: Path, repo: str = REPO, revision: str = "main", *, token: str = "", token_host: str = "127.0.0.1"
) -> subprocess.CompletedProcess[str]:
    """The very shell line the deploy runs, with `folder` in the place of /data/models/NAME."""
    return fetched_as(hub, _At(Base.parse(repo), revision, str(folder)), token, token_host)


@functools.cache
def sent() -> str:
    """The code as the head gets it, unpacked."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    subprocess.run(["tar", "-x", "-C", folder], input=models.packed(models.TRAINING), check=True)
    return folder


def fetched_as(
    hub: Hub, model: models.ModelFolder, token: str = "", token_host: str = ""
) -> subprocess.CompletedProcess[str]:
    folder = Path(model.path)
    command = models.fetch_command(model, sys.executable, hub.url, sent(), token_host)
    home = {"HOME": str(folder.parent), "SPOTUNE_RETRY_DELAY_S": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return subprocess.run(
        ["sh", "-c", command],
        input=f"{token}\n",
        env={**environment, **home},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def state(folder: Path, check: str = "check") -> dict:
    command = fan_out.state_command(str(folder), models.STAMP, check)
    out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    return fan_out.parse_state(out.splitlines())


def test_a_model_is_fetched_verified_and_sealed_with_its_commit(hub: Hub, tmp_path: Path) -> None:
    done = fetched(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    stamp = json.loads((tmp_path / "m" / models.STAMP).read_text())
    assert (stamp["repo"], stamp["revision"], stamp["commit"]) == (REPO, "main", COMMIT)
    assert (tmp_path / "m/model.safetensors").read_bytes() == WEIGHTS
    assert not (tmp_path / "m/.cache").exists()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "m", check=True)
    assert models.ModelFolder(Base.parse(REPO), "main", "m").lies_there(state(tmp_path / "m"))


def test_a_cut_transfer_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    # `hf` counts what it has in chunks of 10 MiB
    weights = random.Random(1).randbytes(25_000_000)
    hub.models[REPO]["model.safetensors"] = weights
    hub.cut("model.safetensors", 12_000_000)
    done = fetched(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert hub.downloads("model.safetensors") == ["", f"bytes={10 * 2**20}-"]
    assert (tmp_path / "m/model.safetensors").read_bytes() == weights


def test_a_fetch_that_was_stopped_leaves_its_whole_files_to_the_next_one(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    half = folder / ".cache/huggingface/download/x.1.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"left behind")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    assert fetched(hub, folder).returncode == 0
    assert hub.downloads("model.safetensors") == []
    assert not half.exists()


def test_the_last_message_of_hf_says_why_a_fetch_failed(hub: Hub, tmp_path: Path) -> None:
    hub.unavailable.add("model.safetensors")
    done = fetched(hub, tmp_path / "m")
    assert done.returncode != 0
    assert f"acme/model could not be fetched from {hub.url} in 3 attempts: " in done.stderr
    assert "503" in done.stderr


def test_a_hub_that_lists_files_and_cuts_them_off_is_named_with_what_names_another(hub: Hub, tmp_path: Path) -> None:
    hub.cut("model.safetensors", *[0] * 100)
    said = fetched(hub, tmp_path / "m").stderr.strip().splitlines()[-1]
    assert f"could not be fetched from {hub.url} in 3 attempts: " in said and "[mirrors] hub = " in said
    assert "Error: " not in said and "httpx" not in said


def test_wrong_bytes_of_the_right_size_are_found_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.send_wrong_bytes("model.safetensors")
    done = fetched(hub, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    assert "not what the hub announced, fetched again: model.safetensors" in done.stderr
    assert (tmp_path / "m/model.safetensors").read_bytes() == WEIGHTS


def test_small_files_are_checked_by_their_git_id(hub: Hub, tmp_path: Path) -> None:
    hub.send_wrong_bytes("config.json")
    assert fetched(hub, tmp_path / "m").returncode == 0
    assert (tmp_path / "m/config.json").read_bytes() == FILES["config.json"]


def test_a_hub_that_keeps_sending_wrong_bytes_is_refused_and_nothing_is_sealed(hub: Hub, tmp_path: Path) -> None:
    hub.send_wrong_bytes("model.safetensors", times=9)
    done = fetched(hub, tmp_path / "m")
    assert done.returncode != 0
    assert "the hub sends other content than it announces: model.safetensors of acme/model" in done.stderr
    assert not (tmp_path / "m" / models.STAMP).exists()


@pytest.mark.parametrize("damage", ["half", "same size", "gone"])
def test_a_damaged_file_is_found_and_only_that_one_fetched_again(hub: Hub, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "m"
    assert fetched(hub, folder).returncode == 0
    weights = folder / "model.safetensors"
    if damage == "half":
        weights.write_bytes(WEIGHTS[:1_000_000])
    elif damage == "same size":
        weights.write_bytes(WEIGHTS[:-1] + b"x")
    else:
        weights.unlink()
    found = state(folder, "verify" if damage == "same size" else "check")
    assert any("model.safetensors" in problem for problem in found["problems"])
    assert not models.ModelFolder(Base.parse(REPO), "main", "m").lies_there(found)
    hub.requests.clear()
    assert fetched(hub, folder).returncode == 0
    assert weights.read_bytes() == WEIGHTS
    assert hub.downloads("model.safetensors")
    assert not hub.downloads("tokenizer.json")


def test_the_quick_check_of_an_untouched_model_finds_nothing(hub: Hub, tmp_path: Path) -> None:
    assert fetched(hub, tmp_path / "m").returncode == 0
    assert state(tmp_path / "m")["problems"] == []
    assert state(tmp_path / "m", "verify")["problems"] == []


def test_a_later_revision_takes_the_files_it_no_longer_has_away(hub: Hub, tmp_path: Path) -> None:
    hub.models[REPO]["old-shard.safetensors"] = b"1" * 5000
    assert fetched(hub, tmp_path / "m").returncode == 0
    del hub.models[REPO]["old-shard.safetensors"]
    assert fetched(hub, tmp_path / "m", revision=COMMIT).returncode == 0
    assert not (tmp_path / "m/old-shard.safetensors").exists()


@pytest.mark.parametrize(
    ("repo", "revision", "sentence"),
    [
        ("acme/unknown", "main", "knows no model acme/unknown"),
        (REPO, "v9", "acme/model has no revision v9"),
        ("acme/gated", "main", "acme/gated is gated: accept its licence on its page, and set HF_TOKEN"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(
    hub: Hub, tmp_path: Path, repo: str, revision: str, sentence: str
) -> None:
    hub.models["acme/gated"] = dict(FILES)
    hub.gated.add("acme/gated")
    done = fetched(hub, tmp_path / "m", repo, revision)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_token_opens_a_gated_model_and_is_in_no_argument(hub: Hub, tmp_path: Path) -> None:
    hub.models["acme/gated"] = dict(FILES)
    hub.gated.add("acme/gated")
    done = fetched(hub, tmp_path / "m", "acme/gated", token=hub.token)
    assert done.returncode == 0, done.stderr
    assert hub.token not in done.stdout + done.stderr
    left = [p for p in tmp_path.rglob("*") if p.is_file() and hub.token.encode() in p.read_bytes()]
    assert left == []


HOSTILE = ["../../outside", "/etc/passwd", "a/../../../outside", "a//b", "..", "", "line\nbreak", "back\\slash", "*"]


@pytest.mark.parametrize("name", [*HOSTILE, None, 7])
def test_a_name_that_is_none_of_a_file_inside_its_folder_is_not_followed(name: object) -> None:
    with pytest.raises(HubError, match="is no name of a file inside its folder"):
        file_name(name)


def test_a_hub_that_names_a_file_elsewhere_is_refused_and_nothing_is_removed(hub: Hub, tmp_path: Path) -> None:
    folder, outside = tmp_path / "models/m", tmp_path / "outside"
    outside.write_text("not the hub's")
    hub.models[REPO]["../../outside"] = b"x"
    done = fetched(hub, folder)
    assert done.returncode != 0
    assert "is no name of a file inside its folder" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert outside.read_text() == "not the hub's"
    assert not list(folder.iterdir())


def test_a_manifest_that_leads_out_of_the_folder_removes_nothing(hub: Hub, tmp_path: Path) -> None:
    folder, outside = tmp_path / "models/m", tmp_path / "outside"
    outside.write_text("not the hub's")
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../../outside\n")
    done = fetched(hub, folder)
    assert done.returncode != 0 and "nothing was removed there" in done.stderr
    assert outside.exists()


def test_a_link_in_the_folder_leads_nothing_out_of_it(hub: Hub, tmp_path: Path) -> None:
    folder, outside = tmp_path / "m", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "config.json").write_text("not the hub's")
    (folder / Path(TOOLS).parent).symlink_to(outside)
    hub.models[REPO][TOOLS] = b"x"
    assert "leads out of" in fetched(hub, folder).stderr
    assert (outside / "config.json").read_text() == "not the hub's"


def test_a_file_named_like_an_option_or_like_one_of_ours_does_no_harm(hub: Hub, tmp_path: Path) -> None:
    ours = {"SHA256SUMS": f"{'0' * 64}  ../../outside\n".encode(), "spotune-model.json": b"{}", ".cache/x": b"x"}
    hub.models[REPO] |= {**ours, "--token.model": b"x"}
    for _ in range(2):
        done = fetched(hub, tmp_path / "m")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "m/--token.model").read_bytes() == b"x"
    assert json.loads((tmp_path / "m" / models.STAMP).read_text())["repo"] == REPO


def test_a_token_is_not_shown_to_a_hub_that_did_not_ask_for_one(hub: Hub, tmp_path: Path) -> None:
    assert fetched(hub, tmp_path / "m", token=hub.token).returncode == 0
    assert (hub.authorised, hub.leaked) == ([], [])
    assert hub.downloads("model.safetensors")


def test_a_mirror_that_asks_gets_no_token_until_it_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.gated_files.add(REPO)
    done = fetched(hub, tmp_path / "m", token=hub.token, token_host="")
    assert done.returncode != 0
    assert "HF_TOKEN is sent to huggingface.co alone" in done.stderr
    assert "SPOTUNE_TOKEN_HOST=127.0.0.1" in done.stderr
    assert (hub.authorised, hub.leaked) == ([], [])


@pytest.mark.parametrize("kind", ["gated", "gated_files", "private"])
def test_a_named_hub_that_asks_sees_the_token_and_its_storage_does_not(hub: Hub, tmp_path: Path, kind: str) -> None:
    getattr(hub, kind).add(REPO)
    with Hub({REPO: dict(FILES)}) as storage:
        hub.storage = storage.url.replace("127.0.0.1", "localhost")
        done = fetched(hub, tmp_path / "m", token=hub.token)
        assert done.returncode == 0, done.stderr
        assert storage.downloads("model.safetensors")
        assert (storage.authorised, storage.leaked) == ([], [])
    assert hub.authorised and hub.leaked == []
    assert hub.token not in done.stdout + done.stderr


@pytest.mark.parametrize("address", ["http://mirror.example", "ftp://mirror.example", "https://", "mirror.example"])
def test_a_mirror_is_asked_over_https_only(address: str) -> None:
    with pytest.raises(HubError, match="https://HOST is expected"):
        hub_at(address, None, "")


@pytest.mark.parametrize(
    ("address", "token_host", "sees"),
    [
        ("", "", True),
        ("https://huggingface.co", "", True),
        ("https://hf-mirror.com", "", False),
        ("https://hf-mirror.com", "hf-mirror.com", True),
        ("https://huggingface.co.evil.example", "", False),
        ("https://huggingface.co@evil.example", "", False),
        ("https://evil.example/huggingface.co", "huggingface.co", False),
        ("http://127.0.0.1:99", "127.0.0.1:99", True),
    ],
)
def test_only_the_hub_itself_and_a_named_host_may_see_the_token(address: str, token_host: str, sees: bool) -> None:
    hub = hub_at(address, "hf_secret", token_host)
    assert (hub.token == "hf_secret", hub.withheld) == (sees, not sees)
    assert "hf_secret" not in repr(hub)


NEWER = "beef" * 10


def test_a_pinned_model_stays_at_its_commit_and_the_change_is_said(hub: Hub, tmp_path: Path) -> None:
    hub.head = NEWER
    done = fetched_as(hub, _At(Base.parse(REPO), "main", str(tmp_path / "m"), COMMIT))
    assert done.returncode == 0, done.stderr
    assert f"acme/model was changed: its main is {NEWER[:12]} by now; {COMMIT[:12]} is fetched" in done.stderr
    assert json.loads((tmp_path / "m" / models.STAMP).read_text())["commit"] == COMMIT


def test_a_pinned_commit_that_is_gone_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.head, hub.gone = NEWER, {COMMIT}
    done = fetched_as(hub, _At(Base.parse(REPO), "main", str(tmp_path / "m"), COMMIT))
    assert done.returncode != 0 and f"acme/model has no revision {COMMIT}" in done.stderr


def test_other_files_at_the_pinned_commit_are_refused_and_get_no_stamp(hub: Hub, tmp_path: Path) -> None:
    assert fetched(hub, tmp_path / "m").returncode == 0
    stamp = json.loads((tmp_path / "m" / models.STAMP).read_text())
    pinned = _At(Base.parse(REPO), "main", str(tmp_path / "m"), COMMIT, stamp["hash"])
    assert pinned.lies_there(state(tmp_path / "m"))
    hub.models[REPO]["config.json"] = b'{"model_type": "another"}'
    done = fetched_as(hub, pinned)
    assert done.returncode != 0 and "has other files than those first fetched" in done.stderr
    assert not (tmp_path / "m" / models.STAMP).exists()


def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(100, 50, 2**30 + len(WEIGHTS) // 2)
    monkeypatch.setattr(fetch_model.shutil, "disk_usage", lambda _: usage)
    files = [fetch_model.Announced("model.safetensors", len(WEIGHTS), None, None)]
    with pytest.raises(fetch_model.ModelError, match="1 GiB to spare"):
        fetch_model.refuse_if_short_of_space(tmp_path, files)


def test_a_model_is_fetched_with_its_licence_and_nothing_else_and_none_without_weights_that_are_read() -> None:
    def names(*paths: str) -> list[str]:
        return [f.path for f in fetch_model.wanted([fetch_model.Announced(p, 1, None, None) for p in paths])]

    model = ["model.safetensors", "config.json", "LICENSE.txt", TOOLS]
    others = ["pytorch_model.bin", "original/a.pth", ".gitattributes", "README.md", "fp8/model.safetensors", "run.py"]
    others += ["consolidated.safetensors"]
    assert names(*model, *others) == model
    assert names("pytorch_model.bin", "config.json") == []


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    with Hub({}) as gone:
        pass
    gone.__class__.url  # noqa: B018
    done = fetched(gone, tmp_path / "m")
    assert done.returncode != 0
    assert "does not answer" in done.stderr and "[mirrors] hub = " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_models_of_the_settings_come_from_their_recipes() -> None:
    tiny, qwen = models.base_models(["tiny", "qwen2.5-14b", "tiny"])
    assert (tiny.base, tiny.folder, len(tiny.commit)) == (TINY, "tiny", 64)
    assert (qwen.base.on_hub, qwen.commit) == (True, "")
    assert qwen.path == f"/data/models/{qwen.folder}"


def test_an_unknown_recipe_is_told_with_the_nearest() -> None:
    with pytest.raises(
        RecipeError,
        match=r"'tinny'; did you mean tiny\? --model OWNER/NAME takes a model of the Hub; fab models lists all ",
    ):
        models.base_models(["tiny", "tinny"])


def test_the_stamp_of_another_revision_is_not_this_model() -> None:
    model = models.ModelFolder(Base.parse(REPO), "main", "m")
    found = {"stamp": {"repo": REPO, "revision": "main", "commit": "1"}, "problems": [], "source": {}}
    assert model.lies_there(found)
    assert not model.lies_there({**found, "stamp": {**found["stamp"], "revision": "v2"}})
    assert not model.lies_there({**found, "problems": ["config.json is missing"]})
    assert not replace(model, commit="2").lies_there(found)


def test_a_built_in_model_is_made_by_the_code_that_was_sent(tmp_path: Path) -> None:
    training = tmp_path / "src/training"
    (training / "models").mkdir(parents=True)
    (training / "__init__.py").touch()
    (training / "models" / "__init__.py").touch()
    (training / "models" / "tiny.py").write_text(
        "import pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\nfolder.mkdir(parents=True)\n"
        "(folder / 'config.json').write_text('{}')\n"
    )
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / "code.tar").write_bytes(models.packed(training))
    subprocess.run(["tar", "-xf", tmp_path / "code.tar", "-C", code], check=True)
    model = _At(TINY, "main", str(tmp_path / "m"), models.code_hash(training))
    for command in models.make_commands(model, sys.executable, str(code)):
        subprocess.run(["sh", "-c", command], check=True)
    assert model.lies_there(state(tmp_path / "m"))
    (training / "models" / "tiny.py").write_text("another")
    assert not replace(model, commit=models.code_hash(training)).lies_there(state(tmp_path / "m"))


def _send(folder: Path, to: Path) -> tuple[models.ModelFolder, list[str]]:
    """What the deploy does on the head with a folder of the user's; the names of the files that went over the line."""
    (wanted,) = models.base_models([str(folder)])
    model = _At(wanted.base, wanted.revision, str(to), wanted.commit)
    listed = subprocess.run(["sh", "-c", FileSums.command(str(to))], capture_output=True, text=True, check=True)
    there = FileSums.process(listed.stdout.splitlines())
    seal = f"{models.seal_command(model, sys.executable)} commit={model.commit}"
    went = []
    for command in (*send_commands(folder, str(to), there), seal):
        if isinstance(command, str):
            subprocess.run(["sh", "-c", command], check=True)
        else:
            went.append(str(Path(command.src).relative_to(folder)))
            shutil.copyfile(command.src, command.dest)
    return model, went


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "my model"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (tmp_path / "there").mkdir()
    return folder


def test_a_folder_of_the_users_is_sent_file_by_file_and_sealed(own: Path, tmp_path: Path) -> None:
    model, went = _send(own, tmp_path / "there")
    assert sorted(went) == sorted(FILES)
    assert model.lies_there(state(tmp_path / "there", "verify"))
    assert {path.name for path in own.iterdir()} == set(FILES), "nothing is written into it"


def test_templates_in_a_folder_are_sent_too_and_what_is_no_part_of_a_model_changes_nothing(
    own: Path, tmp_path: Path
) -> None:
    (own / TOOLS).parent.mkdir()
    (own / TOOLS).write_text("{{tools}}")
    (own / "LICENSE").write_text("mine")
    there = tmp_path / "there"
    model, went = _send(own, there)
    assert sorted(went) == sorted([*FILES, TOOLS, "LICENSE"])
    sealed = state(there, "verify")["stamp"]["hash"]
    for name in (".DS_Store", "desktop.ini", "._config.json", "NOTES.txt", "README.md", "LICENSE"):
        (own / name).write_text("another one")
    assert state_of(own) == model.commit and model.lies_there(state(there, "verify"))
    assert _send(own, there)[1] == ["LICENSE"]
    assert state(there, "verify")["stamp"]["hash"] == sealed and (there / "LICENSE").read_text() == "another one"
    (own / TOOLS).write_text("{{ other }}")
    assert _send(own, there)[1] == [TOOLS] and state(there, "verify")["stamp"]["hash"] != sealed


def test_of_a_folder_that_was_changed_only_what_differs_is_sent(own: Path, tmp_path: Path) -> None:
    before, _ = _send(own, tmp_path / "there")
    (own / "tokenizer.json").rename(own / "tokenizer_config.json")
    (own / "config.json").write_bytes(b'{"model_type": "qwen3"}')
    (tmp_path / "there" / HALF).write_bytes(b"half a file")
    after, went = _send(own, tmp_path / "there")
    assert went == ["config.json", "tokenizer_config.json"]
    found = state(tmp_path / "there", "verify")
    assert after.lies_there(found) and not before.lies_there(found)
    there = {path.name for path in (tmp_path / "there").iterdir()} - {models.STAMP, "SHA256SUMS"}
    assert there == {"config.json", "model.safetensors", "tokenizer_config.json"}


def test_a_folder_that_is_gone_here_is_still_what_the_head_has(own: Path, tmp_path: Path) -> None:
    _send(own, tmp_path / "there")
    shutil.rmtree(own)
    (wanted,) = models.base_models([str(own)])
    assert wanted.lies_there(state(tmp_path / "there"))


def test_a_folder_lies_where_the_run_from_it_looks(own: Path) -> None:
    from training.laptop.start_run import resolve_recipe

    config = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 16}
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer_config.json").write_text("{}")
    (own / "tokenizer.json").write_text("{}")
    write_weights(own)
    (wanted,) = models.base_models([str(own)])
    assert wanted.folder == resolve_recipe(str(own), ()).model_dir


def test_a_file_without_a_digest_is_none_that_could_be_checked(tmp_path: Path) -> None:
    told = SimpleNamespace(rfilename="config.json", size=2, blob_id=None, lfs=None)
    with pytest.raises(HubError, match="no digest"):
        fetch_model._announced(told)
    (tmp_path / "config.json").write_text("{}")
    assert not fetch_model.Announced("config.json", 2, None, None).is_at(tmp_path / "config.json")
