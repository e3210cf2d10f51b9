"""Shared experts, first dense layers and gates of attention, whose names PEFT takes for experts, get the adapter of any
linear module all the same: PEFT reads it again, the plan counts it, and an adapter made without them goes on."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from peft.tuners.lora import Linear, LoraLayer  # noqa: E402
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.support import programs  # noqa: E402
from tests.support.small_models import TYPES  # noqa: E402
from tests.support.type_proof import relative  # noqa: E402
from tests.training.node.test_engine import EXACT, _finish, _new_run, _start  # noqa: E402
from tests.training.node.test_experts import adapted, base_of, logits  # noqa: E402
from tests.training.node.test_types import config_of  # noqa: E402
from training.cost.strategies import cost_of  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node import architecture  # noqa: E402
from training.node.adapter import merge  # noqa: E402
from training.node.adapter.generate import load_base, with_adapter  # noqa: E402
from training.node.head_check import RECIPE  # noqa: E402
from training.node.model import lora_config, trainable_parameters, whole_model  # noqa: E402
from training.node.outline import model_shape  # noqa: E402
from training.node.saving import as_begun  # noqa: E402
from training.recipe.model_types import EXPERTS_NAMES, READ_AS_EXPERTS  # noqa: E402
from training.recipe.reading import with_changes  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.run.history import WEIGHTS  # noqa: E402

pytestmark = pytest.mark.torch

KINDS = sorted(READ_AS_EXPERTS - {"cohere2_moe", "flex_olmo", "olmoe", "qwen3_moe"})
"""Those whose small models have such modules."""
READ = """\
import json, sys, torch
from pathlib import Path
from peft import PeftModel
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
found = {}
for folder in map(Path, sys.argv[1:]):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    said = set_peft_model_state_dict(model, load_file(folder / "adapter" / "adapter_model.safetensors"))
    wrong = [name for name in (*said.missing_keys, *said.unexpected_keys) if ".lora_" in name]
    trained = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    with torch.no_grad():
        loaded, merged = (one(torch.arange(4, 44).view(1, -1)).logits for one in (model, model.merge_and_unload()))
    right = torch.load(folder / "right.pt")
    found[folder.name] = wrong, trained, *(float((x - right).abs().max() / right.abs().max()) for x in (loaded, merged))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each type a base, an adapter and what both say together."""
    house = tmp_path_factory.mktemp("shared")
    for kind in KINDS:
        base_of(kind).save_pretrained(house / kind / "base")
        model = adapted(kind, RECIPE).model
        model.save_pretrained(house / kind / "adapter")
        torch.save(logits(model), house / kind / "right.pt")
    return house


def test_which_types_and_names_peft_takes_for_experts_is_known():
    models = {kind: architecture.build(config_of(kind)) for kind in TYPES}
    names = sorted(EXPERTS_NAMES)
    assert {kind for kind, model in models.items() if not architecture.left_by_peft(model, names)} == READ_AS_EXPERTS
    for kind in READ_AS_EXPERTS:
        model = models[kind]
        taken = {name.rpartition(".")[2] for name in architecture.adapted(model)} & EXPERTS_NAMES
        assert bool(taken) == (kind in KINDS), "else it is not tried below"


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_module_but_routers_is_adapted_as_a_linear_module_and_no_expert_is(kind):
    model = adapted(kind, RECIPE).model
    linear = {name for name, one in base_of(kind).named_modules() if isinstance(one, torch.nn.Linear)}
    wanted = {name for name in linear if not architecture.ROUTERS & set(name.split("."))} - {"lm_head"}
    found = {name: one for name, one in model.get_base_model().named_modules() if isinstance(one, LoraLayer)}
    assert found.keys() == wanted and all(type(one) is Linear for one in found.values())
    assert any(name.rpartition(".")[2] in EXPERTS_NAMES for name in found)


def test_plain_peft_in_a_fresh_process_reads_and_merges_what_was_trained(saved):
    argv = programs.forked(READ, *(saved / kind for kind in KINDS), peft=True)
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == KINDS
    for kind, (wrong, trained, loaded, merged) in found.items():
        assert wrong == [] and trained == model_shape(config_of(kind)).facts(RECIPE).trainable, kind
        assert loaded < 1e-5 and merged < 1e-5, kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_of_files_and_what_answers_here_say_the_same(kind, saved, tmp_path):
    base, adapter, right = saved / kind / "base", saved / kind / "adapter", torch.load(saved / kind / "right.pt")
    merge.merge(base, adapter, tmp_path / "merged")
    assert relative(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), right) < 1e-5
    tuned = with_adapter(load_base(base), base, adapter)
    assert relative(logits(tuned), right) < 1e-5
    assert not any(isinstance(one, ParamWrapper) for one in tuned.modules()), "which makes W + B A in each forward"


def test_other_parameters_than_experts_and_whole_weights_are_not_merged(saved, tmp_path):
    adapter = shutil.copytree(saved / "glm4_moe" / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"].append("mlp.gate.e_score_correction_bias")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(merge.AdapterError, match="target_parameters are not understood here"):
        merge.merge(saved / "glm4_moe" / "base", adapter, tmp_path / "merged")


def test_modules_so_named_can_be_asked_for_and_a_router_cannot(tmp_path):
    base = base_of("deepseek_v2")
    asked = with_changes(RECIPE, **{"lora.targets": ["kv_b_proj", "mlp.shared_experts.up_proj"]})
    config = lora_config(asked, base, tmp_path)
    assert config.target_modules == {"kv_b_proj"}
    assert config.target_parameters == ["mlp.shared_experts.up_proj.weight"]
    model = adapted("deepseek_v2", asked).model
    assert len(trainable_parameters(model)) == 2 * (2 + 1), "of two layers the first is dense"
    with pytest.raises(RecipeError, match=r"lora\.targets: gate: in .*, that is the router; leave it out"):
        lora_config(with_changes(RECIPE, **{"lora.targets": ["q_b_proj", "gate"]}), base, tmp_path)


@pytest.mark.parametrize(("key", "value", "off"), [("lora.dropout", "0.1", "0"), ("lora.dora", "true", "false")])
def test_what_peft_has_not_for_them_is_refused_by_the_plan_and_on_the_node_unless_others_are_named(
    key, value, off, tmp_path
):
    config_of("glm4_moe").save_pretrained(tmp_path)
    shape, recipe = model_shape(config_of("glm4_moe")), load_recipe("tiny", {"lora.dropout": "0", key: value})
    said = (
        f"{key}: of a glm4_moe PEFT has none for down_proj, gate_proj, up_proj, outside of experts too; take {key} = "
        f"{off}, or name the others in lora.targets: k_proj, o_proj, q_proj, v_proj"
    )
    assert cost_of(recipe).misfit(shape, recipe, 1) == said
    assert whole_model(recipe, tmp_path).unread == said, "unless it goes on with an adapter that has others"
    others = with_changes(recipe, **{"lora.targets": ["k_proj", "o_proj", "q_proj", "v_proj"]})
    assert cost_of(others).misfit(shape, others, 1) == ""
    assert whole_model(others, tmp_path).facts.trainable == shape.facts(others).trainable
    plain = model_shape(config_of("qwen2_moe"))
    assert cost_of(recipe).misfit(plain, recipe, 1) == "", "of whose shared expert PEFT takes the names as they are"


@pytest.mark.parametrize("experts", [False, True])
def test_a_second_stage_has_the_modules_of_the_first_where_those_are_fewer(experts, tmp_path):
    whole = with_changes(RECIPE, **{"lora.experts": experts})
    fewer = with_changes(whole, **{"lora.targets": ["k_proj", "o_proj", "q_proj", "v_proj"]})
    now = trainable_parameters(adapted("glm4_moe", whole).model)
    (tmp_path / WEIGHTS).parent.mkdir()
    for begun, expected in ((fewer, fewer), (whole, whole)):
        had = trainable_parameters(adapted("glm4_moe", begun).model)
        save_file({name: p.detach().contiguous() for name, p in had.items()}, tmp_path / WEIGHTS)
        assert as_begun(whole, tmp_path, None, now) == expected
    assert as_begun(fewer, tmp_path, None, had) == fewer, "who names modules has those"
    assert as_begun(whole, tmp_path / "none", None, now) == whole


def test_an_adapter_that_was_begun_without_them_goes_on_without_them(tmp_path):
    """As a run of before, whose recipe says all-linear, and has the dropout that PEFT has not for them. A new run with
    it is refused."""
    exact = EXACT | {"lora.dropout": "0.1"}
    (tmp_path / "models").mkdir()
    tiny.write_model(tmp_path / "models" / "tiny", steps=0)
    vocabulary = json.loads((tmp_path / "models" / "tiny" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    for name in ("config.json", "model.safetensors", "SHA256SUMS"):
        (tmp_path / "models" / "tiny" / name).unlink(missing_ok=True)
    small = architecture.build(config_of("deepseek_v2", vocab_size=vocabulary))
    small.save_pretrained(tmp_path / "models" / "tiny")
    fewer = {"lora.targets": '["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]'}
    run = _new_run(tmp_path, "run", exact | {"steps": "2", "save_every": "2"} | fewer)
    assert _finish(_start(run, 1))[0] == [0]
    (run / "recipe.toml").write_text(load_recipe("tiny", exact).to_toml())
    codes, said = _finish(_start(run, 1, "--resume", "--force"))
    assert codes == [0]
    assert "goes on as it was begun, with kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj alone" in said[0]
    config = json.loads((run / "checkpoints" / "step-4" / "adapter" / "adapter_config.json").read_text())
    assert not config["target_parameters"] and "o_proj" in config["target_modules"]
    codes, said = _finish(_start(run, 1, "--resume"))
    assert codes == [0] and "goes on as it was begun" in said[0], "what it has saved since is a run's of before"
    codes, said = _finish(_start(_new_run(tmp_path, "new", exact | {"steps": "2"}), 1))
    assert codes != [0] and "PEFT has none for down_proj, gate_proj, up_proj" in said[0]
