"""Presets against plans, wrap policies against torch's recursion, parallelize plans against `parallelize_module`."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import wrap
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardfn as sf
from shardfn.layout.planning import replace_units
from shardfn.policies import ddp, from_parallelize_plan, from_wrap_policy, fsdp, gathered, hsdp, zero2
from shardfn.testing import assert_parity, count_collectives, on_meshes


class Block(nn.Module):
    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c)
        self.up = nn.Linear(c, 4 * c)
        self.down = nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---------------------------------------------------------------------------------------------------------------------
# Presets


def test_presets_are_policies() -> None:
    assert fsdp() == sf.Policy() and hsdp(min_size=3) == fsdp(min_size=3) == sf.Policy(min_size=3)
    assert ddp().default == "replicate" and ddp(default="auto").default == "auto"
    assert zero2().regather is False and zero2(regather=True).regather is True
    merged = ddp(rules={"a": "x"}) | zero2(rules={"b": "y"}, compute_dtype=torch.bfloat16)
    assert list(merged.rules) == ["b", "a"] and merged.default == "replicate" and merged.regather is False
    with pytest.raises(TypeError, match="no field 'rule'; did you mean 'rules'"):
        zero2(rule={})


def test_what_presets_shard() -> None:
    mesh = sf.MeshSpec(replicate=2, fsdp=4)
    whole = sf.plan(Model(), mesh, ddp()).bytes_per_rank
    assert whole == 4 * sum(p.numel() for p in Model().parameters())
    for preset in (fsdp, hsdp, zero2):
        plan = sf.plan(Model(), mesh, preset())
        plan.assert_sharded(1.0)
        assert plan.bytes_per_rank * 4 == whole
        assert not any("replicate" in layout.axes for layout in plan.layouts.values())
    assert sf.plan(Model(), mesh, zero2()).comm_bytes < sf.plan(Model(), mesh, fsdp()).comm_bytes
    ruled = sf.plan(Model(), mesh, ddp(rules={"head.weight": "v@fsdp c"}))
    assert [name for name, layout in ruled.layouts.items() if layout.axes] == ["head.weight"]


# ---------------------------------------------------------------------------------------------------------------------
# Wrap policies


class Wrapped(nn.Module):
    """What torch's recursion puts around a module; it is never run."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


def torch_wraps(model: nn.Module, policy: Any) -> list[str]:
    """The names that FSDP1 would wrap below the root."""
    if isinstance(policy, wrap._Policy):
        chosen = policy._run_policy(model, set(), {})
        return [name for name, module in model.named_modules() if name and module in chosen]
    names = {id(module): name for name, module in model.named_modules()}
    wrapped: set[str] = set()

    def note(module: nn.Module) -> nn.Module:
        wrapped.add(names[id(module)])
        return Wrapped(module)

    wrap._recursive_wrap(model, policy, note, set(), set(), only_wrap_children=True)
    return [name for name in names.values() if name in wrapped]


def our_units(model: nn.Module, policy: Any) -> list[str]:
    return list(replace_units(from_wrap_policy(policy), dict(model.named_modules())).units)


def own(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return not isinstance(module, nn.ModuleList) or recurse


POLICIES: dict[str, Any] = {
    "size 50": partial(wrap.size_based_auto_wrap_policy, min_num_params=50),
    "size 300": partial(wrap.size_based_auto_wrap_policy, min_num_params=300),
    "size 600": partial(wrap.size_based_auto_wrap_policy, min_num_params=600),
    "size, excluding": partial(wrap.size_based_auto_wrap_policy, min_num_params=50, exclude_wrap_modules={Block}),
    "size, leaves": partial(wrap.size_based_auto_wrap_policy, min_num_params=50, force_leaf_modules={Block}),
    "transformer": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Embedding)),
    "module": wrap.ModuleWrapPolicy({Block, nn.Linear}),
    "module, the root too": wrap.ModuleWrapPolicy({Model, Block}),
    "custom": wrap.CustomPolicy(lambda module: isinstance(module, Block) or {}),
    "always": wrap.always_wrap_policy,
    "own": own,
    "nothing": partial(wrap.size_based_auto_wrap_policy),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("tied", [False, True])
def test_units_are_those_that_fsdp1_wraps(policy: Any, tied: bool) -> None:
    ours = our_units(Model(tied), policy)
    assert ours == torch_wraps(Model(tied), policy)
    assert "" not in ours


TREES = st.recursive(st.integers(0, 4), lambda inner: st.lists(inner, min_size=1, max_size=3))


@given(sizes=TREES, least=st.integers(0, 60))
@settings(deadline=None)
def test_the_recursion_is_torchs(sizes: Any, least: int) -> None:
    def build(tree: Any) -> nn.Module:
        return nn.Linear(tree, 5, bias=False) if isinstance(tree, int) else nn.Sequential(*map(build, tree))

    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", lambda self: None)
        policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=least)
        assert our_units(build([sizes]), policy) == torch_wraps(build([sizes]), policy)


def test_one_wrap_policy_serves_many_models() -> None:
    policy = from_wrap_policy(wrap.ModuleWrapPolicy({Block})) | sf.Policy(compute_dtype=torch.bfloat16)
    for count in (1, 3):
        model = nn.Sequential(*(Block() for _ in range(count)))
        names = [unit.name for unit in sf.plan(model, sf.MeshSpec(fsdp=2), policy).units]
        assert names == [str(i) for i in range(count)]


def test_wrap_policies_that_cannot_be_honoured() -> None:
    with pytest.raises(TypeError, match="expected an auto_wrap_policy of FSDP1, got set"):
        from_wrap_policy({Block})
    custom = wrap.CustomPolicy(lambda m: {"backward_prefetch": None} if isinstance(m, Block) else False)
    with pytest.raises(sf.ShardError, match=r"returned settings \['backward_prefetch'\] for 'layers.0'"):
        sf.plan(Model(), sf.MeshSpec(fsdp=2), from_wrap_policy(custom))
    with pytest.raises(TypeError, match="returned 0 for ''"):
        sf.plan(Model(), sf.MeshSpec(fsdp=2), from_wrap_policy(wrap.CustomPolicy(cast(Any, lambda module: 0))))


# ---------------------------------------------------------------------------------------------------------------------
# Parallelize plans

PLAN: dict[str, ParallelStyle] = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def test_rules_of_a_plan() -> None:
    rules = {
        "embed.weight": "_@tp _@fsdp",
        "layers.*.up.weight": "_@tp _@fsdp",
        "layers.*.down.weight": "_@fsdp _@tp",
        "head.weight": "_@tp _@fsdp",
    }
    assert from_parallelize_plan(PLAN).rules == rules
    other = from_parallelize_plan({"head": RowwiseParallel()}, axis="model", data_axis=None)
    assert other.rules == {"head.weight": "_ _@model"}
    assert from_parallelize_plan(RowwiseParallel()).rules == {"weight": "_@fsdp _@tp"}
    layouts = (Replicate(), None)
    nothing = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    assert from_parallelize_plan({"layers.0": nothing}).rules == {}


def test_shell_patterns_of_torch() -> None:
    policy = from_parallelize_plan({"layers.[!0].u?": ColwiseParallel()})
    plan = sf.plan(Model(), sf.MeshSpec(fsdp=1, tp=2), policy)
    assert [name for name, x in plan.layouts.items() if "tp" in x.axes] == ["layers.1.up.weight", "layers.1.up.bias"]
    plan = sf.plan(Model(), sf.MeshSpec(fsdp=1, tp=2), from_parallelize_plan({"layers.[0-1].up": ColwiseParallel()}))
    assert sum("tp" in x.axes for x in plan.layouts.values()) == 4


@on_meshes({"fsdp": 2, "tp": 2})
def test_shards_and_losses_are_those_of_parallelize_module(mesh: DeviceMesh) -> None:
    model, ids = Model().double(), torch.arange(12).reshape(2, 6)
    policy = from_parallelize_plan(PLAN, data_axis=None) | sf.Policy(default="replicate")
    params = sf.shard(model, mesh, policy)
    want = model(ids)
    assert_parity(sf.apply(model, params, ids), want)
    theirs = parallelize_module(model, mesh["tp"], PLAN)
    for name, leaf in theirs.named_parameters():
        mine = params[name]
        assert isinstance(mine, DTensor)
        assert torch.equal(mine.to_local(), leaf.to_local() if isinstance(leaf, DTensor) else leaf), name
    assert_parity(theirs(ids), want)


def test_styles_that_are_not_served_are_listed() -> None:
    class Mine(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return module

    plan: dict[str, ParallelStyle] = {
        "layers.*.up": ColwiseParallel(input_layouts=Shard(0)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(-1)),
        "layers.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "layers.1": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
        "layers": PrepareModuleInputOutput(
            input_kwarg_layouts={"x": Shard(0)},
            desired_input_kwarg_layouts={"x": Replicate()},
            output_layouts=Replicate(),
            desired_output_layouts=Replicate(),
        ),
        "head": Mine(),
    }
    with pytest.raises(sf.ShardError) as error:
        from_parallelize_plan(plan)
    assert str(error.value).splitlines() == [
        "from_parallelize_plan: 6 problems",
        "1. 'layers.*.up': ColwiseParallel(input_layouts=Shard(0)) is not available; "
        "what is served is Replicate() or Shard(1)",
        "2. 'layers.*.down': RowwiseParallel(output_layouts=Shard(-1)) is not available; "
        "what is served is Replicate() or Shard(1)",
        "3. 'layers.0': PrepareModuleInput(desired_input_layouts=Shard(1)) splits an input that was whole; "
        "split the output of the module before it",
        "4. 'layers.1': PrepareModuleOutput(output_layouts=Shard(-1)) is not available; "
        "what is served is Replicate() or Shard(1)",
        "5. 'layers': PrepareModuleInputOutput(input_kwarg_layouts=Shard(0)) is not available; "
        "what is served is Replicate() or Shard(1)",
        "6. 'head': Mine is not a style that is known here; write a rule for its parameters",
    ]


def test_a_plan_that_does_not_fit_the_model() -> None:
    with pytest.raises(sf.ShardError, match=r"rule 'layers.\*.nrom.weight' matches no parameter"):
        sf.plan(Model(), sf.MeshSpec(fsdp=1, tp=2), from_parallelize_plan({"layers.*.nrom": ColwiseParallel()}))
    with pytest.raises(sf.ShardError, match=r"layers.0.norm.weight"):
        sf.plan(Model(), sf.MeshSpec(fsdp=1, tp=2), from_parallelize_plan({"layers.*.norm": ColwiseParallel()}))
    with pytest.raises(TypeError, match="expected module path -> style, got str"):
        from_parallelize_plan(cast(Any, "colwise"))


def test_a_function_is_asked_what_fsdp1_asks() -> None:
    def questions(ask: Any) -> list[tuple[str, bool, int]]:
        asked: list[tuple[str, bool, int]] = []

        def note(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((type(module).__name__, recurse, nonwrapped_numel))
            return nonwrapped_numel > 100

        ask(Model(), note)
        return asked

    ours = questions(our_units)
    assert ours == questions(torch_wraps) and ("Model", False) not in [(name, recurse) for name, recurse, _ in ours]


# ---------------------------------------------------------------------------------------------------------------------
# Inference


def test_gathered_rules() -> None:
    made = gathered(
        sf.Policy(
            rules={"a": "(kv@tp? d) c@fsdp", "b": "ff @ tp@fsdp? c", "c": "x@dp_replicate@data?  y", "d": "8@fsdp 4"},
            axes={"ff": ("tp", "fsdp"), "c": "fsdp", "h": "tp"},
            compute_dtype=torch.bfloat16,
        )
    )
    assert made.rules == {"a": "(kv@tp? d) c", "b": "ff@tp? c", "c": "x y", "d": "8 4"}
    assert made.axes == {"ff": ("tp",), "h": ("tp",)}
    assert made.compute_dtype == torch.bfloat16
    assert "regather" not in made.given


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 3})
def test_a_gathered_tree_is_used_without_gathers(mesh: DeviceMesh) -> None:
    model = Model().double()
    policy = sf.Policy(rules={"layers.*.up.weight": "ff@tp@fsdp c", "layers.*.down.weight": "c@fsdp ff@tp"})
    policy = policy if "tp" in (mesh.mesh_dim_names or ()) else sf.Policy()
    params, ids = sf.shard(model, mesh, policy), torch.arange(4).view(1, 4)
    kept = sf.reshard(params, gathered(params.plan.policy))
    with torch.no_grad():
        sf.apply(model, kept, ids)  # the first two calls compare their inputs over tp
        sf.apply(model, kept, ids)
        with count_collectives() as counted:
            out = sf.apply(model, kept, ids)
    torch.testing.assert_close(out, model(ids))
    assert (counted.all_gather, counted.send) == (0, 0)
    assert counted.all_reduce == (2 if "tp" in (mesh.mesh_dim_names or ()) else 0)  # a row-parallel linear a layer


def test_a_list_of_regular_expressions() -> None:
    model = nn.ModuleDict({"wq": nn.Linear(8, 16), "wo": nn.Linear(16, 8), "norm": nn.LayerNorm(8)})
    listed = [(r"wq\.weight$", ("tp", ("fsdp",))), ("wo.*weight", (None, "tp")), ("norm", ()), ("weight", "_@fsdp _")]
    policy = sf.policies.from_regex(listed[:3])
    plan = sf.plan(model, sf.MeshSpec(fsdp=2, tp=2), policy)
    assert sf.typeof(plan, "wq.weight") == "f32[_@tp _@fsdp]"
    assert sf.typeof(plan, "wo.weight") == "f32[_ _@tp]", "None is whole"
    assert sf.typeof(plan, "norm.weight") == "f32[_]", "dims without an entry are whole"
    with pytest.raises(sf.ShardError, match="matches no parameter"):
        sf.plan(model, sf.MeshSpec(fsdp=2, tp=2), sf.policies.from_regex([*listed, ("embed", ())]))
    first = sf.policies.from_regex([(".*", ()), *listed[:1]])
    assert sf.typeof(sf.plan(model, sf.MeshSpec(fsdp=2, tp=2), first), "wq.weight") == "f32[_ _]", "the first wins"


@pytest.mark.parametrize("entry", ["wq", ("wq",), ("wq", 3), ("wq", (3,)), (1, ())])
def test_what_is_no_pair_of_expression_and_spec(entry: Any) -> None:
    with pytest.raises(TypeError, match="from_regex"):
        sf.policies.from_regex([entry])


def test_a_plan_of_torch_on_a_data_axis_of_another_name() -> None:
    policy = from_parallelize_plan({"*.up": ColwiseParallel()}, data_axis="shards")
    assert policy.batch[0] == "shards" and set(sf.Policy().batch) < set(policy.batch)
    assert "batch" not in from_parallelize_plan({"*.up": ColwiseParallel()}, data_axis="dp").given
