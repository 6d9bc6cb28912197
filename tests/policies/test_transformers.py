"""Models of transformers by `from_transformers`: logits, loss, every gradient and three steps as on one rank."""

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, Family, InDouble
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_parity, on_meshes

MESHES = ({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
STEPS = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# In float32 a gradient that is nothing but rounding would be a whole step of AdamW.
EPS = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass
class _Reference:
    """On one rank: outputs, loss and gradients, the losses of AdamW's steps and the weights after them."""

    logits: dict[str, Tensor]
    loss: Tensor
    grads: dict[str, Tensor]
    losses: list[float]
    weights: dict[str, Tensor]


def _reference(family: Family, dtype: torch.dtype) -> _Reference:
    model = family.make(dtype)
    inputs, ids = _batch(family, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, eps=EPS[dtype])
    losses, grads, logits = [], {}, {}
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(**inputs)
        loss = family.loss(out, ids)
        loss.backward()
        if not step:
            logits = {name: x.detach() for name, x in family.logits(out).items()}
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in _named(model)}
        optimizer.step()
        losses.append(loss.item())
    first = torch.tensor(losses[0], dtype=dtype)
    return _Reference(logits, first, grads, losses, {n: p.detach() for n, p in _named(model)})


def _batch(family: Family, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    inputs, ids = family.batch()
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}, ids


def _named(model: nn.Module) -> Any:
    return model.named_parameters(remove_duplicate=False)


@pytest.mark.everyday(1)
@pytest.mark.one_mesh
@pytest.mark.sample(16)
@pytest.mark.parametrize("name", FAMILIES)
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_a_family_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    _train(mesh, FAMILIES[name])


VARIANTS = {
    "one key head": ("Llama", {"num_key_value_heads": 1}),
    "two key heads": ("Qwen3", {"num_key_value_heads": 2}),
    "two key heads, eager attention": ("Qwen3", {"num_key_value_heads": 2, "attn_implementation": "eager"}),
    "a vocabulary that does not divide": ("Llama", {"vocab_size": 97}),
    "a tied vocabulary that does not divide": ("GPT-2", {"vocab_size": 101}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@on_meshes({"fsdp": 1, "tp": 4})
def test_a_variant_is_as_on_one_rank(mesh: DeviceMesh, variant: str) -> None:
    name, fields = VARIANTS[variant]
    family = FAMILIES[name]
    _train(mesh, replace(family, fields=family.fields | fields))


@pytest.mark.parametrize("name", "Llama GPT-2 Gemma3 BLOOM DeepSeek-V3 Mixtral T5 ViT".split())
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_family_in_float32_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    _train(mesh, FAMILIES[name], torch.float32)


def _assert_first_step(
    mesh: DeviceMesh, family: Family, model: nn.Module, params: sf.Params, expected: _Reference, tol: float
) -> tuple[Tensor, sf.Params]:
    """Logits of this rank's samples, the loss and every gradient are those of one rank; returns the last two."""
    local, local_ids = sf.data.local_batch(_batch(family, expected.loss.dtype), mesh)

    def loss_fn(params: sf.Params) -> tuple[Tensor, dict[str, Tensor]]:
        out = sf.apply(model, params, **local)
        return family.loss(out, local_ids), family.logits(out)

    (loss, logits), grads = sf.value_and_grad(loss_fn, has_aux=True)(params)
    assert_parity(logits, sf.data.local_batch(expected.logits, mesh), tol=tol)
    assert_parity({"loss": loss}, {"loss": expected.loss}, tol=tol)
    assert_parity(sf.gather(grads), expected.grads, tol=tol)
    return loss, grads


def _train(mesh: DeviceMesh, family: Family, dtype: torch.dtype = torch.float64) -> None:
    model, tol = family.make(dtype), TOLERANCE[dtype]
    params = sf.shard(model, mesh, sf.policies.from_transformers(model))
    local, local_ids = sf.data.local_batch(_batch(family, dtype), mesh)

    def loss_fn(params: sf.Params) -> Tensor:
        return family.loss(sf.apply(model, params, **local), local_ids)

    with InDouble() if dtype == torch.float64 else nullcontext():
        expected = _reference(family, dtype)
        optimizer = sf.optim.adamw(1e-3, weight_decay=0, eps=EPS[dtype])
        state, losses = optimizer.init(params), []
        for step in range(STEPS):
            if step:
                loss, grads = sf.value_and_grad(loss_fn)(params)
            else:
                loss, grads = _assert_first_step(mesh, family, model, params, expected, tol)
            params, state = optimizer.step(params, grads, state)
            losses.append(float(loss))
    torch.testing.assert_close(losses, expected.losses, rtol=tol, atol=tol)
    assert_parity(sf.gather(params), expected.weights, tol=10 * tol)
    split = [x.name for x in params.plan.layouts.values() if "tp" in x.axes]
    assert len(split) > 8, "tensor parallelism splits the blocks and the vocabulary"


def _policy(name: str) -> sf.Policy:
    return sf.policies.from_transformers(FAMILIES[name].make())


@pytest.mark.everyday(1)
def test_a_plan_is_rules_that_can_be_pasted() -> None:
    policy = _policy("Llama")
    assert policy.rules["model.layers.*.self_attn.k_proj.weight"] == "(kv@tp? d) _@fsdp"
    assert policy.units == ("model.layers.*",)
    pasted = sf.Policy(**{name: getattr(policy, name) for name in policy.given})
    model, mesh = FAMILIES["Llama"].make(), sf.MeshSpec(fsdp=2, tp=2)
    assert sf.plan(model, mesh, pasted) == sf.plan(model, mesh, policy)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("policy", "model", "axes", "match"),
    [
        ("Llama", "GPT-2", {"fsdp": 2, "tp": 2}, r"rule 'model\.embed_tokens\.weight' matches no parameter"),
        ("GPT-2", "GPT-2", {"fsdp": 1, "tp": 8}, r"attn.c_attn.weight.*\(heads=4\) over tp=8, 4 % 8 = 4"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(policy: str, model: str, axes: dict[str, int], match: str) -> None:
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(FAMILIES[model].make(), sf.MeshSpec(**axes), _policy(policy))


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [("OPT", "self_attn", "view"), ("GPT-2", "attn", "is taken from elsewhere"), ("BLOOM", "self_attention", "")],
)
def test_fixed_sizes_are_found_without_processes(name: str, where: str, why: str) -> None:
    """Each of these attention modules has the head count of the whole model in an attribute; in a graph it stays."""
    model = FAMILIES[name].make()
    policy = sf.policies.from_transformers(model)
    without = sf.Policy(**{field: getattr(policy, field) for field in policy.given - {"local_sizes"}})
    example = torch.zeros(2, 8, dtype=torch.long)
    sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=example)
    with pytest.raises(sf.ShardError, match=rf"\d\.{where}(.|\n)*{re.escape(why)}"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), without | sf.Policy(compile=True), example=example)
    if name != "BLOOM":
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), without, example=example)


@pytest.mark.everyday(1)
def test_other_models_and_styles_are_errors() -> None:
    with pytest.raises(TypeError, match="expected a model of transformers, got Linear"):
        sf.policies.from_transformers(nn.Linear(2, 2))
    model: Any = FAMILIES["Llama"].make()
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal", "model.norm": "colwise"}
    with pytest.raises(
        sf.ShardError, match=r"'diagonal' is not known(.|\n)*'model.norm': style 'colwise' is for linears"
    ):
        sf.policies.from_transformers(model)


def test_layers_that_differ_have_rules_of_their_own() -> None:
    """Gemma 4's last layers have other heads than the ones before."""
    config = {"num_key_value_heads": 2, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    fields = {**FAMILIES["Gemma3"].fields, **config, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
    family = replace(FAMILIES["Gemma3"], model="Gemma4ForCausalLM", config="Gemma4TextConfig", fields=fields)
    model = family.make()
    policy = sf.policies.from_transformers(model)
    assert next(iter(policy.rules)).startswith("model.layers.1.self_attn"), "before the rule for all layers"
    plan = sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.zeros(2, 8, dtype=torch.long))
    shapes = [plan.local_shape(f"model.layers.{i}.self_attn.q_proj.weight") for i in (0, 1)]
    assert shapes == [(16, 32), (32, 32)]


@pytest.mark.everyday(1)
def test_a_forward_that_fails_on_one_rank_too_says_so() -> None:
    family = FAMILIES["Llama"]
    model: Any = family.make()
    model.model.layers[1].self_attn.head_dim = 7
    with pytest.raises(sf.ShardError, match=r"on whole weights, failed in 'model.layers.1.self_attn'"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), _policy("Llama"), example=torch.zeros(2, 8, dtype=torch.long))


def test_experts_are_followed_inside() -> None:
    """Halves side by side, cut as if they were one weight: what an expert computes would be something else."""
    family = FAMILIES["Mixtral"]
    policy = _policy("Mixtral")
    name = "model.layers.*.mlp.experts.gate_up_proj"
    assert policy.rules[name] == "_ (2 _@tp) _@fsdp"
    example = torch.zeros(2, 8, dtype=torch.long)
    sf.plan(family.make(), sf.MeshSpec(fsdp=1, tp=2), policy, example=example)
    cut = policy | sf.Policy(rules={name: "_ _@tp _@fsdp"})
    with pytest.raises(sf.ShardError, match=r"mlp\.experts'.*a slice cuts through the part of a split dim"):
        sf.plan(family.make(), sf.MeshSpec(fsdp=1, tp=2), cut, example=example)


@pytest.mark.everyday(1)
def test_experts_that_only_the_plan_tells_are_added_up() -> None:
    """The code of a model of one's own need not know transformers' implementations of experts."""
    model: Any = FAMILIES["Mixtral"].make()
    for layer in model.model.layers:
        del layer.mlp.experts.has_gate
    policy = sf.policies.from_transformers(model)
    assert "model.layers.*.mlp.experts" in policy.compute
    sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.zeros(2, 8, dtype=torch.long))
    policy = replace(policy, compute={})
    with pytest.raises(sf.ShardError, match=r"mlp"):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), policy, example=torch.zeros(2, 8, dtype=torch.long))


@pytest.mark.everyday(1)
def test_halves_of_experts_are_split_whatever_the_plan_says() -> None:
    model: Any = FAMILIES["Mixtral"].make()
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts.gate_up_proj": "colwise"}
    assert sf.policies.from_transformers(model).rules["model.layers.*.mlp.experts.gate_up_proj"] == "_ (2 _@tp) _@fsdp"


@pytest.mark.everyday(1)
def test_another_name_of_an_axis_is_one_problem() -> None:
    model, mesh = FAMILIES["Llama"].make(), sf.MeshSpec(dp=2, tp=2)
    with pytest.raises(sf.ShardError, match=r"plan: 2 problems(.|\n)*did you mean 'dp'(.|\n)*15 more .*data_axis="):
        sf.plan(model, mesh, sf.policies.from_transformers(model))
    made = sf.plan(model, mesh, sf.policies.from_transformers(model, data_axis="dp"))
    assert "dp" in made.layouts["model.norm.weight"].axes


@on_meshes({"shards": 2, "tp": 2}, {"replicate": 2, "shards": 2})
def test_a_data_axis_of_any_name_splits_the_batch(mesh: DeviceMesh) -> None:
    family = FAMILIES["Llama"]
    model, axis = family.make(), "tp" if "tp" in (mesh.mesh_dim_names or ()) else None
    policy = sf.policies.from_transformers(model, axis=axis, data_axis="shards")
    inputs, ids = family.batch()
    local, local_ids = sf.data.local_batch((inputs["input_ids"], ids), mesh, policy)
    assert len(local) == (2 if axis else 1)
    params = sf.shard(model, mesh, policy)
    assert "shards" in params.plan.roles.shardable
    loss, grads = sf.value_and_grad(lambda p: family.loss(sf.apply(model, p, input_ids=local), local_ids))(params)
    expected = family.loss(model(**inputs), ids)
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-5)
    assert_parity(sf.gather(grads), {n: p.grad for n, p in _named(model)}, tol=1e-5)


@pytest.mark.everyday(1)
def test_usual_names_of_data_axes_leave_the_policy_as_it_is() -> None:
    model = FAMILIES["Llama"].make()
    for axis in ("fsdp", "dp", None, ("dp", "fsdp")):
        assert "batch" not in sf.policies.from_transformers(model, data_axis=axis).given
    policy = sf.policies.from_transformers(model, data_axis="shards")
    with pytest.raises(sf.ShardError, match=r"Policy\.batch: the mesh .* has no axis 'shards'"):
        sf.plan(model, sf.MeshSpec(fsdp=2, tp=2), policy)


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_model_that_was_never_called_gives_its_hidden_states_once(mesh: DeviceMesh) -> None:
    """transformers installs hooks at the first call that asks for them; shape-only traces leave none."""
    model, reference = FAMILIES["Llama"].make(), FAMILIES["Llama"].make()
    params = sf.shard(model, mesh, sf.policies.from_transformers(model))
    inputs, _ = FAMILIES["Llama"].batch()
    expected = reference(**inputs, output_hidden_states=True).hidden_states
    for _ in range(2):
        found = sf.apply(model, params, input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(model(**inputs, output_hidden_states=True).hidden_states) == len(expected)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("pad", "served"), [({"kv": 4}, False), ({"kv": 4, "heads": 8}, True)])
@on_meshes({"fsdp": 1, "tp": 4})
def test_padded_heads_meet_the_keys_of_their_group(mesh: DeviceMesh, pad: dict[str, int], served: bool) -> None:
    fields = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 48}
    family = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | fields)
    model = family.make()
    inputs, ids = family.batch()
    policy = sf.policies.from_transformers(model) | sf.Policy(pad={"vocab": 64} | pad)
    if not served:
        with pytest.raises(sf.ShardError, match=r"heads=12 and kv=3 padded to 4 .*pad=\{'heads': 16, 'kv': 4\}"):
            sf.shard(model, mesh, policy)
        return
    params = sf.shard(model, mesh, policy)
    loss = family.loss(sf.apply(model, params, input_ids=inputs["input_ids"]), ids)
    torch.testing.assert_close(loss, family.loss(model(**inputs), ids), rtol=1e-5, atol=1e-5)


class _LoraLinear(nn.Module):
    """As peft's: a linear, and beside it halves of low rank by the name of the adapter."""

    def __init__(self, base: Any, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        out, into = (base.weight.shape[i] for i in ((1, 0) if type(base).__name__ == "Conv1D" else (0, 1)))
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


class _Copied(nn.Module):
    """As peft's: a layer, and a copy that is trained whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class _Tuner(nn.Module):
    """As peft's `LoraModel`, and with another one around it as its `PeftModel`: what it lacks is the model's."""

    def __init__(self, inner: str, model: nn.Module) -> None:
        super().__init__()
        setattr(self, inner, model)
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.__dict__["inner"]), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.inner)(*args, **kwargs)


_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_proj", "c_fc")


def _adapted(family: Family) -> nn.Module:
    model = family.make().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in _ADAPTED:
                setattr(module, name, _LoraLinear(child))
            elif name in ("embed_tokens", "lm_head") and family is FAMILIES["Llama"]:
                setattr(module, name, _Copied(child) if name == "embed_tokens" else _LoraLinear(child))
    return _Tuner("base_model", _Tuner("model", model)).double()


def _adapters_train(mesh: DeviceMesh, name: str, sequence: bool) -> None:
    family = FAMILIES[name]
    model = _adapted(family)
    policy = sf.policies.from_transformers(model, sequence_parallel=sequence)
    inputs, ids = _batch(family, torch.float64)
    with InDouble():
        loss = family.loss(model(**inputs), ids)
        loss.backward()
        local, local_ids = sf.data.local_batch((inputs, ids), mesh)
        params = sf.shard(model, mesh, policy)
        found, grads = sf.value_and_grad(lambda p: family.loss(sf.apply(model, p, **local), local_ids))(params)
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_parity(
        {"loss": found, **{name: x for name, x in sf.gather(grads).items() if name in trained}},
        {"loss": loss.detach(), **trained},
        tol=1e-9,
    )
    split = [layout.name for layout in params.plan.layouts.values() if "tp" in layout.axes]
    assert all(name.startswith("base_model.model.") for name in split) and len(trained) > 8
    assert any("lora_A" in name for name in split) and any("lora_B" in name for name in split)


@pytest.mark.one_mesh
@pytest.mark.parametrize(("name", "sequence"), [("Llama", False), ("Llama", True), ("GPT-2", False)])
@on_meshes(*MESHES)
def test_models_inside_adapters(mesh: DeviceMesh, name: str, sequence: bool) -> None:
    _adapters_train(mesh, name, sequence)


@pytest.mark.everyday(1)
def test_a_model_of_which_nothing_is_split_is_said() -> None:
    made = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    )
    with pytest.warns(UserWarning, match=r"ResNetForImageClassification has no tp_plan(.|\n)*axis=None"):
        assert not sf.policies.from_transformers(made).rules
    assert not sf.policies.from_transformers(made, axis=None).rules
    with pytest.warns(UserWarning, match="the plan is empty"):
        sf.policies.from_parallelize_plan({})
