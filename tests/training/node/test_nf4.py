"""A base model in four bits a weight: loaded, trained between looks, kept, and refused where damaged."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("bitsandbytes", reason="needs the [train] extra")

from bitsandbytes.functional import quantize_4bit  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from tests.support.llama_shape import model_shape  # noqa: E402
from tests.support.tiny_adapter import write_adapter  # noqa: E402
from training.cost.memory import weight_bytes  # noqa: E402
from training.cost.shape import known_shape  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.laptop.adapter.tuned_model import Room, packing_bytes  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import model, nf4, nf4_making  # noqa: E402
from training.node.adapter.generate import BASE, load_base, reader, speaking, with_adapter  # noqa: E402
from training.node.adapter.merge import merge  # noqa: E402
from training.node.checkpoint import CheckpointError, TrainerState, base_model_hash, refuse_other  # noqa: E402
from training.recipe.base import Base  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.text.files import SUMS  # noqa: E402

pytestmark = pytest.mark.torch

SIDES = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXACT = {"dtype": "float32", "lora.dropout": "0", "strategy": "zero0", "base_precision": "nf4"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model whose layers have biases, and one whose have none."""
    folder = tmp_path_factory.mktemp("data") / "models"
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIDES, tie_word_embeddings=True)).bfloat16().save_pretrained(folder / "biased")
    LlamaForCausalLM(LlamaConfig(**SIDES)).bfloat16().save_pretrained(folder / "plain", max_shard_size="200KB")
    return folder


def _recipe(**overrides):
    return load_recipe("tiny", EXACT | {key.replace("__", "."): v for key, v in overrides.items()})


def _batch(seed=0):
    dice = torch.Generator().manual_seed(seed)
    ids = [torch.randint(512, (n,), generator=dice).tolist() for n in (24, 9)]
    return collate([[Sample(one, one) for one in ids]], 0, "packed")


def _trained(folder, looks, **overrides):
    """Losses and last gradients of two backward passes, with `looks` at held-out rows between them."""
    recipe = _recipe(**overrides)
    fused = model.LossModel(model.load(recipe, folder), recipe)
    trained = model.trainable_parameters(fused.model)
    for name, p in trained.items():
        if "lora_B" in name:
            p.data = torch.linspace(-0.02, 0.02, p.numel(), dtype=p.dtype).view_as(p)
    sums = []
    for seed in (1, 2):
        loss = fused(**model.inputs(_batch(seed), "cpu"))
        loss[0].backward()
        sums.append(loss.detach()[0].item())
        if seed == 1:
            for _ in range(looks):
                seen = model.evaluated(fused, [_batch(1)], "cpu")
                assert seen[0].item() == sums[0], "a look computes what training does"
    return sums, {name: p.grad.clone() for name, p in trained.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["biased", "plain"])
def test_training_after_a_look_at_held_out_rows_is_what_it_was_without(models, kind, dtype):
    losses, gradients = _trained(models / kind, looks=0, dtype=dtype)
    again, with_looks = _trained(models / kind, looks=2, dtype=dtype)
    assert again == losses
    assert all(torch.equal(with_looks[name], gradients[name]) for name in gradients)
    assert all(gradient.any() for name, gradient in gradients.items() if "lora_A" in name)


def test_no_layer_is_packed_for_inference_on_whatever_cpu(models, monkeypatch):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    loaded = model.load(_recipe(), models / "plain")
    layers = [module for module in loaded.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 2 * 7 and not any(layer.support_avx512bf16_for_cpu for layer in layers)


def _bytes(loaded):
    """Of all parameters, and of the scales beside packed ones."""
    scales = [p.quant_state for p in loaded.parameters() if hasattr(p, "quant_state")]
    beside = [t for s in scales for t in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)]
    return sum(t.nbytes for t in (*loaded.parameters(), *loaded.buffers(), *beside))


def test_the_memory_of_a_plan_is_what_the_loaded_model_holds(tmp_path):
    config = LlamaConfig(**SIDES | {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 2000})
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "models" / "wide")
    folder = tmp_path / "models" / "wide"
    recipe, shape = _recipe(dtype="bfloat16"), model_shape(json.loads((folder / "config.json").read_text()))
    loaded = nf4.load(nf4.ready(folder, torch.bfloat16), folder, dtype=torch.bfloat16)
    assert weight_bytes(shape, recipe) == pytest.approx(_bytes(loaded), rel=0.03)
    assert weight_bytes(shape, recipe) < 0.6 * 2 * shape.parameters


def test_what_is_added_is_of_the_recipes_dtype_and_the_head_is_not_packed(models):
    loaded = model.load(_recipe(dtype="bfloat16"), models / "plain")
    assert {p.dtype for p in loaded.parameters()} == {torch.uint8, torch.bfloat16}
    assert type(model.causal_model(loaded).get_output_embeddings()) is torch.nn.Linear
    assert loaded.peft_config["default"].base_model_name_or_path == str(models / "plain"), "not the folder it came from"


def test_the_four_bits_are_made_once_and_taken_from_then_on(models, capsys, monkeypatch):
    entry = nf4.ready(models / "biased", torch.float32)
    capsys.readouterr()
    monkeypatch.setattr(nf4_making, "quantize_4bit", None)
    assert nf4.ready(models / "biased", torch.float32) == entry
    assert capsys.readouterr().out == ""


def test_a_damaged_folder_is_made_again_and_is_the_same_to_the_bit(models, capsys):
    entry = nf4.ready(models / "plain", torch.float32)
    sums = (entry / SUMS).read_text()
    shard = sorted(entry.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert nf4.ready(models / "plain", torch.float32) == entry
    assert f"{shard.name} is missing or damaged" in capsys.readouterr().out
    assert (entry / SUMS).read_text() == sums


def test_another_models_folder_is_not_taken_for_this_ones(models, capsys):
    mine, others = (nf4.ready(models / name, torch.float32) for name in ("plain", "biased"))
    sums = (mine / SUMS).read_text()
    shutil.rmtree(mine)
    shutil.copytree(others, mine)
    assert nf4.ready(models / "plain", torch.float32) == mine
    assert "it is of another model" in capsys.readouterr().out
    assert (mine / SUMS).read_text() == sums


def test_a_matrix_made_piece_by_piece_is_what_bitsandbytes_makes_of_it(monkeypatch):
    monkeypatch.setattr(nf4_making, "PIECE", 1 << 12)
    weight = torch.randn(192, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    with nf4_making._workers() as pool:
        ours = nf4_making.pack("w", weight, pool)
    wanted = {"w": codes} | {f"w.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_other_files_and_another_precision_have_another_folder(models, tmp_path):
    shutil.copytree(models / "biased", tmp_path / "models" / "biased")
    before = nf4.place(tmp_path / "models" / "biased", torch.float32)
    assert before.name == nf4.place(models / "biased", torch.float32).name
    assert before != nf4.place(tmp_path / "models" / "biased", torch.bfloat16)
    with (tmp_path / "models" / "biased" / "config.json").open("a") as file:
        file.write("\n")
    assert before != nf4.place(tmp_path / "models" / "biased", torch.float32)


def test_a_model_without_room_or_without_its_weights_is_refused_in_a_sentence(models, tmp_path, monkeypatch):
    shutil.copytree(models / "biased", tmp_path / "models" / "biased")
    monkeypatch.setattr(nf4_making.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(RecipeError, match=r"needs up to \d+\.\d KiB in .*, 10 B are free"):
        nf4.ready(tmp_path / "models" / "biased", torch.float32)
    (tmp_path / "models" / "biased" / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="no weights in safetensors files"):
        nf4.ready(tmp_path / "models" / "biased", torch.float32)
    assert [path.name for path in (tmp_path / "cache" / "nf4").iterdir()] == ["lock"]


def test_a_nodes_other_ranks_wait_for_the_first_and_the_node_is_named_where_it_cannot(models, tmp_path, monkeypatch):
    shutil.copytree(models / "biased", tmp_path / "models" / "biased")
    folder = tmp_path / "models" / "biased"
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = threading.Thread(target=nf4.make_here, args=(folder, torch.float32))
    other.start()
    other.join(0.2)
    assert other.is_alive() and not nf4.place(folder, torch.float32).exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    nf4.make_here(folder, torch.float32)
    other.join(60)
    assert not other.is_alive() and (nf4.place(folder, torch.float32) / SUMS).is_file()
    shutil.rmtree(nf4.place(folder, torch.float32))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RecipeError, match=rf"^base_precision nf4 on {socket.gethostname()}: .*not as long as"):
        nf4.make_here(folder, torch.float32)


def test_a_linear_layer_in_four_bits_is_not_trained_whole(models):
    with pytest.raises(RecipeError, match=r"lora.modules_to_save: down_proj: .* name them in lora.targets"):
        model.whole_model(_recipe(lora__modules_to_save='["norm", "down_proj"]'), models / "plain")
    whole = model.whole_model(_recipe(lora__modules_to_save='["norm", "lm_head"]'), models / "plain")
    assert whole.shapes["base_model.model.lm_head.weight"] == (512, 128)


@pytest.mark.parametrize("kind", ["biased", "plain"])
def test_a_part_built_without_memory_computes_what_the_whole_model_does(models, kind):
    """As a stage of a pipeline would read its layers."""
    entry = nf4.ready(models / kind, torch.float32)
    whole = nf4.load(entry, models / kind, dtype=torch.float32).get_decoder()
    prefix = "model.layers.1."
    found = nf4.read(entry, lambda name: name.startswith(prefix))
    with torch.device("meta"):
        part = type(whole.layers[1])(whole.config, 1)
    nf4.fill(part, {name.removeprefix(prefix): tensor for name, tensor in found.items()}, torch.float32)
    hidden = torch.randn(1, 12, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    turned = whole.rotary_emb(hidden, torch.arange(12)[None])
    outs = [layer(hidden, position_embeddings=turned) for layer in (whole.layers[1], part)]
    assert torch.equal(*outs)
    assert torch.equal(*(torch.autograd.grad(out.sum(), hidden)[0] for out in outs))
    assert not any(p.is_meta for p in part.parameters())


def _checkpoint(models, folder, name, **recipe):
    """A checkpoint's adapter, as a run of that recipe would leave it."""
    adapter = write_adapter(models / name, folder / "step-4" / "adapter", strength=0.05)
    maths = _recipe(**recipe).compute_keys()
    state = {"recipe": maths, "base_model": base_model_hash(models / name)}
    (folder / "step-4" / "trainer_state.json").write_text(json.dumps(state))
    return adapter


def test_answers_and_measures_are_those_of_the_base_that_was_trained_beside(models, tmp_path):
    four = _checkpoint(models, tmp_path / "four", "plain")
    sixteen = _checkpoint(models, tmp_path / "sixteen", "plain", base_precision="dtype")
    loaded = {}
    for name, adapter in (("four", four), ("sixteen", sixteen)):
        loaded[name] = with_adapter(load_base(models / "plain", adapter), models / "plain", adapter)
    assert any(isinstance(module, Linear4bit) for module in loaded["four"].modules())
    assert not any(isinstance(module, Linear4bit) for module in loaded["sixteen"].modules())
    logits = {name: reader(one)([5, 6, 7]) for name, one in loaded.items()}
    apart = (logits["four"] - logits["sixteen"]).norm() / logits["sixteen"].norm()
    assert 0 < apart < 0.5
    with speaking(loaded["four"], BASE):
        assert not torch.equal(reader(loaded["four"])([5, 6, 7]), logits["four"])


def test_a_merge_takes_the_base_as_it_was_before_it_was_rounded(models, tmp_path):
    adapters = [
        _checkpoint(models, tmp_path / precision, "plain", base_precision=precision) for precision in ("nf4", "dtype")
    ]
    merged = [merge(models / "plain", adapter, tmp_path / f"merged-{n}").folder for n, adapter in enumerate(adapters)]
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in merged]
    assert files[0] == files[1] and len(files[0]) > 1
    assert all((merged[0] / name).read_bytes() == (merged[1] / name).read_bytes() for name in files[0])


def test_a_card_that_holds_the_four_bits_is_large_enough_for_their_run():
    shape = known_shape(Base.parse("Qwen/Qwen2.5-14B-Instruct"))
    taken = packing_bytes({"base_precision": "nf4", "shape": asdict(shape)})
    whole = Room(2 * shape.parameters, 22 * 2**30)
    assert whole.too_big and not replace(whole, model_bytes=whole.model_bytes - taken).too_big
    assert packing_bytes({"shape": asdict(shape)}) == packing_bytes({}) == 0


def test_a_checkpoint_of_sixteen_bits_does_not_go_on_in_four(tmp_path):
    state = TrainerState(
        step=2,
        tokens=8,
        world_size=1,
        recipe=_recipe(base_precision="dtype").compute_keys(),
        base_model="b",
        data="d",
        rng=[],
        updates=2,
        replicas=1,
    )
    assert refuse_other(tmp_path, state, _recipe(base_precision="dtype").compute_keys(), "b", "d") == []
    with pytest.raises(CheckpointError, match="base_precision was 'dtype' and is 'nf4'"):
        refuse_other(tmp_path, state, _recipe().compute_keys(), "b", "d")
