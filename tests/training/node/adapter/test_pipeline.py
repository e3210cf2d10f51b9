"""A model over several ranks: the same words as in one process, and each rank read its share alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import forked_rank, tiny_adapter

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = pytest.mark.torch

from training.data.questions import Sampling, from_prompts  # noqa: E402
from training.models.folder import weight_bytes  # noqa: E402
from training.node.adapter.generate import Pair, answers  # noqa: E402
from training.node.stages import shares  # noqa: E402
from training.text.problems import AdapterError  # noqa: E402

PROGRAM = Path(__file__).parents[4] / "training" / "node" / "adapter" / "pipeline.py"
PROMPTS = ["What does shutil.rmtree do?", "What does os.walk do? 你好"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter.write_base(tmp_path_factory.mktemp("pipeline") / "base", layers=4)


def over_ranks(world: int, run: Path, model: Path, adapter: Path | None, sampling: Sampling) -> list[tuple[int, str]]:
    """(exit code, output) of each rank."""
    run.mkdir()
    if adapter:
        (run / "adapter").symlink_to(adapter)
    asked = {"model": str(model), "questions": from_prompts(PROMPTS), "sampling": vars(sampling)}
    (run / "questions.json").write_text(json.dumps(asked))
    return list(zip(*forked_rank.finish(forked_rank.start(world, PROGRAM, "--run", run), 180), strict=True))


@pytest.mark.parametrize(
    ("world", "untied", "sampling"),
    [(2, False, Sampling(20)), (3, True, Sampling(20, 0.9, 0.95, 7))],
    ids=["2 ranks, bf16, tied, token rows, greedy", "3 ranks, fp32, untied, DoRA and head, sampled"],
)
def test_ranks_say_token_by_token_what_one_process_says(base: Path, tmp_path: Path, world, untied, sampling):
    model = base
    if untied:
        model = tiny_adapter.write_variant(base, tmp_path / "model", tied=False)
    # the rows are those of the template's own tokens, so every prompt has them
    rows, whole = {"trainable_token_indices": {"embed_tokens": [0, 1, 2]}}, {"modules_to_save": ["lm_head"]}
    adapter = tiny_adapter.write_adapter(model, tmp_path / "adapter", use_dora=untied, **(whole if untied else rows))
    for code, out in over_ranks(world, tmp_path / "run", model, adapter, sampling):
        assert code == 0, out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    pair = Pair(model, adapter)
    alone = list(answers(pair.names, pair.answer, from_prompts(PROMPTS), sampling))
    assert result["answers"] == alone
    assert all(answer["base"] != answer["tuned"] for answer in alone)

    loaded = result["loaded_bytes"]
    embedding = 0 if untied else 2048 * 128 * 2  # a tied one is read by the first rank and the last
    with_adapter = weight_bytes(model) + (adapter / "adapter_model.safetensors").stat().st_size
    assert sum(loaded) <= with_adapter + embedding
    assert max(loaded) < 0.7 * with_adapter


def test_without_an_adapter_there_is_only_the_base_and_too_few_layers_end_with_one_sentence(base: Path, tmp_path: Path):
    ended = over_ranks(5, tmp_path / "run", base, None, Sampling(2))
    assert {code for code, _ in ended} == {2}
    assert ended[0][1].strip().splitlines()[-1] == "a model of 4 layers cannot be spread over 5 ranks"


@pytest.mark.parametrize(("layers", "world", "embedding"), [(48, 4, 2.8), (28, 3, 1.0), (4, 4, 5.0), (64, 8, 1.6)])
def test_every_layer_has_one_rank_in_order_and_the_loads_are_even(layers: int, world: int, embedding: float):
    found = shares(layers, world, embedding)
    assert [layer for share in found for layer in share.layers] == list(range(layers))
    loads = [len(share.layers) + embedding * (share.is_first + share.is_last) for share in found]
    assert all(share.layers for share in found)
    assert max(loads) - min(loads) < 1.5 or min(len(share.layers) for share in found) == 1


def test_more_ranks_than_layers_is_refused():
    with pytest.raises(AdapterError, match="4 layers cannot be spread over 5"):
        shares(4, 5, 1.0)
