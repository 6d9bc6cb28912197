"""Optimizers on shards against `torch.optim` on one process, pure `update` against fused `step`, norms and clipping."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardfn as sf
from shardfn import optim as sfo
from shardfn._torch import unwrap_local, version_of, with_local, wrap_local
from shardfn.comm.buckets import leaf_spec
from shardfn.comm.flat_memory import empty_flat, merged
from shardfn.layout.layout import local_slice, to_leaves
from shardfn.layout.mesh import grid_of
from shardfn.optim import elementwise, torch_classes
from shardfn.optim.base import Optimizer
from shardfn.testing import assert_parity, assert_trees_close, count_collectives, on_meshes

MESHES = ({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4}, {"fsdp": 3, "tp": 1})
F64 = torch.float64

# Every kind of layout: split over tp, over fsdp (6 over 4 leaves the last rank nothing, 5 over 2 and 3 is uneven), over
# both, over neither; fused with unequal parts, padded, scalar, frozen, integer.
POLICY = sf.Policy(
    rules={
        "emb.weight": "vocab@tp c@fsdp",
        "qkv.weight": "(q: heads@tp d + k: kv@tp d) c@fsdp",
        "qkv.bias": "(q: heads@tp d + k: kv@tp d)",
        "norm.*": "...",
    },
    sizes={"d": 2, "heads": 8, "kv": 4},
    pad={"vocab": 4},
)
LAST_TWO = {"p{5,6}": {"lr": 0.01}}
GROUPS = {"**.bias": {"weight_decay": 0.0}, "qkv.weight": {"lr": 3e-2}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 24)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 5)
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.frozen.requires_grad_(False)


def make_model(dtype: torch.dtype = F64) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


@cache
def draw_grads(dtype: torch.dtype, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Gradients of model shape, some exactly zero; nonsense for what does not train."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, p in make_model(dtype).named_parameters():
        if p.is_floating_point():
            grad = scale * torch.randn(p.shape, dtype=F64, generator=generator)
            out[name] = (grad * (grad.abs() > 0.1) if p.requires_grad else grad * math.nan).to(p.dtype)
        else:
            out[name] = torch.full_like(p, -7)
    return out


def sharded_like(params: sf.Params, full: Mapping[str, Tensor]) -> sf.Params:
    """Full tensors in the parameters' layouts, cut without communication."""
    places = grid_of(params.mesh, params.plan.roles.storage)
    leaves: dict[str, Tensor] = {}
    for layout in params.plan.layouts.values():
        for leaf, whole in zip(layout.leaves, to_leaves(layout, full[layout.name]), strict=True):
            local = local_slice(leaf, whole, places.sizes, places.coords).contiguous()
            leaves[leaf.name] = with_local(params[leaf.name], local)
    return params.like(leaves)


def grads_of(params: Any, step: int) -> Any:
    full = draw_grads(params["head.weight"].dtype, step)
    if not isinstance(params, sf.Params):
        return {name: full[name] for name in params}
    made: dict[Any, sf.Params] = vars(params.mesh).setdefault("_grads_of_this_test", {})
    key = (params.plan.digest, params["head.weight"].dtype, step)
    if key not in made:
        made[key] = sharded_like(params, full)
    return made[key]


def copied(params: Any) -> Any:
    return (
        sf.tree.map_local(torch.clone, params)
        if isinstance(params, sf.Params)
        else {k: v.clone() for k, v in params.items()}
    )


def clipped_adamw(lr: float) -> Optimizer:
    return sfo.chain(sfo.clip_by_global_norm(0.5), sfo.adamw(lr))


def torch_groups(model: nn.Module, options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Torch's spelling of `groups=`: one group per parameter."""
    from shardfn.layout.policy import first_match

    groups = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            pattern = first_match(options, [name])
            groups.append({"params": [p], **(options[pattern] if pattern else {})})
    return groups


def train_torch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float = math.inf) -> None:
    """The first steps of a torch optimizer."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for step in range(steps):
        for p, grad in zip(model.parameters(), draw_grads(next(model.parameters()).dtype, step).values(), strict=True):
            p.grad = grad.clone() if p.requires_grad else None
        if math.isfinite(clip):
            nn.utils.clip_grad_norm_(trainable, clip)
        optimizer.step()


def train(opt: Optimizer, params: Any, state: Any, steps: range, *, pure: bool) -> tuple[Any, Any]:
    """The same steps of ours, through `update` or through `step`."""
    for step in steps:
        grads = grads_of(params, step)
        if pure:
            updates, state = opt.update(grads, state, params)
            params = sfo.apply_updates(params, updates)
        else:
            params, state = opt.step(params, grads, state)
    return params, state


def is_params(tree: object) -> bool:
    return isinstance(tree, sf.Params)


def placements(leaf: Tensor) -> Any:
    assert isinstance(leaf, DTensor)
    return leaf.placements


def full_of(params: Any) -> dict[str, Tensor]:
    return sf.gather(params) if isinstance(params, sf.Params) else dict(params)


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@cache
def case_by_torch(case: str) -> dict[str, Tensor]:
    """The parameters after ten steps of torch's optimizer."""
    _, make, groups = CASES[case]
    model = make_model()
    train_torch(model, make(torch_groups(model, groups)), 10)
    return detached(model)


def lr_of(step: int) -> float:
    return 1e-2 / (step + 1)


CASES: dict[str, tuple[Callable[[], Optimizer], Callable[[Any], torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adamw": (
        lambda: sfo.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, (0.8, 0.95), 1e-6, 0.1),
        {},
    ),
    "adamw groups": (lambda: sfo.adamw(1e-2, groups=GROUPS), lambda p: torch.optim.AdamW(p, 1e-2), GROUPS),
    "sgd": (lambda: sfo.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1), {}),
    "sgd nesterov": (
        lambda: sfo.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, groups={"head.*": {"momentum": 0.5}}),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        {"head.*": {"momentum": 0.5}},
    ),
    "sgd part momentum": (
        lambda: sfo.sgd(0.1, groups={"{norm,qkv}.*": {"momentum": 0.9}}),
        lambda p: torch.optim.SGD(p, 0.1),
        {"{norm,qkv}.*": {"momentum": 0.9}},
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# On meshes, against torch


@pytest.mark.everyday(2)
@on_meshes(*MESHES)
def test_ten_steps_equal_those_of_torch(mesh: DeviceMesh) -> None:
    for case, (make, _, _) in CASES.items():
        results = []
        for pure in (False, True):
            opt, params = make(), sf.shard(make_model(), mesh, POLICY)
            with count_collectives() as counts:
                params, state = train(opt, params, opt.init(params), range(10), pure=pure)
            assert counts.total == 0, counts
            assert_parity(full_of(params), case_by_torch(case), tol=1e-14)
            assert int(state.step) == 10
            results.append([full_of(tree) for tree in (params, *state[1:])])
        assert_parity(*results, tol=1e-14)


@on_meshes(*MESHES)
def test_what_does_not_train_has_no_state_and_stays(mesh: DeviceMesh) -> None:
    model = make_model()
    for make in (CASES["adamw"][0], lambda: sfo.lion(0.1), lambda: sfo.from_torch(torch.optim.Adam)):
        opt, params = make(), sf.shard(model, mesh, POLICY)
        state = opt.init(params)
        still = {name: params[name] for name in ("frozen.weight", "frozen.bias", "count")}
        before = copied(params)
        trees = pytree.tree_leaves(state, is_leaf=is_params)
        trees = [tree for tree in trees if isinstance(tree, sf.Params)]
        for tree in trees:
            assert tree.plan is params.plan and not set(tree) & set(still)
            assert all(placements(leaf) == placements(params[name]) for name, leaf in tree.items())
            assert [name for name in params if name in tree] == list(tree)
        assert trees
        updates, _ = opt.update(sharded_like(params, draw_grads(F64, 0)), state, params)
        assert not set(updates) & set(still)
        assert sfo.apply_updates(params, updates)["count"] is params["count"]
        assert_trees_close(full_of(params), full_of(before), rtol=0, atol=0)  # update changes nothing
        opt.step(params, sharded_like(params, draw_grads(F64, 0)), state)
        for name, leaf in still.items():
            assert params[name] is leaf
            assert torch.equal(unwrap_local(leaf), unwrap_local(before[name]))
        for name in sorted(set(params) - set(still)):
            changed = not torch.equal(unwrap_local(params[name]), unwrap_local(before[name]))
            assert changed == (unwrap_local(params[name]).numel() > 0), name
        assert_zero_padding(params)


def assert_zero_padding(params: sf.Params) -> None:
    """The padded row of the vocabulary is still zero."""
    places = grid_of(params.mesh, params.plan.roles.storage)
    start, length = params.plan.leaves["emb.weight"][1].local_range(places.sizes, places.coords)[0]
    row = 11 - start
    if 0 <= row < length:
        assert not unwrap_local(params["emb.weight"])[row].any()


@on_meshes({"fsdp": 2, "tp": 2})
def test_step_works_in_place(mesh: DeviceMesh) -> None:
    model = make_model()
    for make in (
        *(case[0] for case in CASES.values()),
        lambda: sfo.from_torch(torch.optim.RMSprop),
        lambda: sfo.lion(1e-3),
    ):
        opt = sfo.chain(sfo.clip_by_global_norm(1.0), make())
        params = sf.shard(model, mesh, POLICY)
        for name, leaf in params.items():
            if leaf.is_floating_point():  # as a Trainer keeps them
                params[name] = nn.Parameter(leaf, requires_grad=params.plan.leaves[name][0].trainable)
        leaves, memory = dict(params), {name: unwrap_local(leaf).data_ptr() for name, leaf in params.items()}
        state = opt.init(params)
        for step in range(2):
            after, state = opt.step(params, sharded_like(params, draw_grads(F64, step)), state)
            assert after is params
        assert all(params[name] is leaf for name, leaf in leaves.items())
        assert {name: unwrap_local(leaf).data_ptr() for name, leaf in params.items()} == memory
        assert isinstance(params["head.weight"], nn.Parameter) and params["head.weight"].grad_fn is None
        twin = sf.shard(model, mesh, POLICY)
        train(opt, twin, opt.init(twin), range(2), pure=False)
        assert_trees_close(full_of(params), full_of(twin), rtol=0, atol=0)


@on_meshes(*MESHES)
def test_state_reshards_with_its_parameters(mesh: DeviceMesh) -> None:
    for make in (CASES["adamw groups"][0], lambda: sfo.from_torch(torch.optim.AdamW, lr=1e-2, amsgrad=True)):
        model, opt = make_model(), make()
        stay = sf.shard(model, mesh, POLICY)
        stay, _ = train(opt, stay, opt.init(stay), range(6), pure=False)
        params = sf.shard(model, mesh, POLICY)
        params, state = train(opt, params, opt.init(params), range(3), pure=False)
        other = sf.Policy(rules={"head.weight": "v c@fsdp", "qkv.weight": "o@tp@fsdp c"})
        moved = sf.reshard(params, other)
        nodes, structure = pytree.tree_flatten(state, is_leaf=is_params)
        state = pytree.tree_unflatten([sf.reshard(x, other) if is_params(x) else x for x in nodes], structure)
        moved, _ = train(opt, moved, state, range(3, 6), pure=False)
        assert_parity(full_of(moved), full_of(stay), tol=1e-14)


TORCH_CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (torch.optim.Adadelta, {"lr": 0.1, "foreach": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
    (torch.optim.Rprop, {"lr": 0.01}),
]


@cache
def class_by_torch(index: int) -> dict[str, Tensor]:
    cls, kwargs = TORCH_CLASSES[index]
    model = make_model()
    train_torch(model, cls([p for p in model.parameters() if p.requires_grad], **kwargs), 3)
    return detached(model)


@pytest.mark.everyday(2)
@on_meshes(*MESHES)
def test_torch_optimizers_on_shards(mesh: DeviceMesh) -> None:
    assert {cls for cls, _ in TORCH_CLASSES} == set(torch_classes.ELEMENTWISE)
    start = sf.shard(make_model(), mesh, POLICY)
    for index, (cls, kwargs) in enumerate(TORCH_CLASSES):
        for pure in (False, True):
            opt, params = sfo.from_torch(cls, **kwargs), copied(start)
            with count_collectives() as counts:
                state = opt.init(params)
                shape = pytree.tree_structure(state)
                params, state = train(opt, params, state, range(3), pure=pure)
            assert counts.total == 0
            assert pytree.tree_structure(state) == shape, f"{cls.__name__}: init shows what there will be"
            assert_parity(full_of(params), class_by_torch(index), tol=1e-13)


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_torch_optimizers_that_need_whole_matrices(mesh: DeviceMesh) -> None:
    names = ["head.weight", "emb.weight"]
    rules = sf.Policy(rules={"emb.weight": "vocab@tp? c@fsdp"})
    model, reference = make_model(torch.float32), make_model(torch.float32)
    theirs = torch.optim.Muon([dict(reference.named_parameters())[name] for name in names], lr=0.1)
    train_torch(reference, theirs, 2)
    opt = sfo.masked(sfo.from_torch(torch.optim.Muon, lr=0.1), names)
    for pure in (False, True):
        params = sf.shard(model, mesh, rules)
        params, _ = train(opt, params, opt.init(params), range(2), pure=pure)
        full = full_of(params)
        for name, p in detached(reference).items():
            tol = 0.02 if name in names else 0.0  # torch orthogonalises in bfloat16
            torch.testing.assert_close(full[name], p, rtol=0, atol=tol)
        assert not torch.equal(full["head.weight"], detached(model)["head.weight"])
    with pytest.raises(sf.ShardError, match=r"torch's Muon cannot update .* a DTensor of shape"):
        sfo.from_torch(torch.optim.Muon).init(params)
    with pytest.raises(sf.ShardError, match=r"Muon looks at whole matrices; 'qkv.weight' is stored in parts"):
        sfo.masked(sfo.from_torch(torch.optim.Muon), "qkv.weight").init(sf.shard(model, mesh, POLICY))


@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1})
def test_muon_is_that_of_one_process_but_for_bfloat16(mesh: DeviceMesh) -> None:
    """Its iteration in float64 on both sides: in bfloat16 the rounding of small singular values is amplified."""
    rules = sf.Policy(rules={"head.weight": "out@tp? c@fsdp"})
    model, reference = make_model(), make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.double)
        train_torch(reference, torch.optim.Muon([reference.head.weight], lr=0.1), 3)
        opt = sfo.masked(sfo.from_torch(torch.optim.Muon, lr=0.1), "head.weight")
        params = sf.shard(model, mesh, rules)
        params, _ = train(opt, params, opt.init(params), range(3), pure=False)
    assert_parity(full_of(params), detached(reference), tol=1e-13)


def test_every_class_of_torch_is_known_or_refused() -> None:
    found = {x for x in vars(torch.optim).values() if isinstance(x, type) and issubclass(x, torch.optim.Optimizer)}
    known = {*torch_classes.ELEMENTWISE, *torch_classes.WHOLE}
    assert found - known - set(torch_classes.REFUSED) == {torch.optim.Optimizer}
    for cls in found - known - {torch.optim.Optimizer}:
        with pytest.raises(sf.ShardError, match=f"{cls.__name__} cannot run on shards"):
            sfo.from_torch(cls, elementwise=True)


class Plain(torch.optim.Optimizer):
    """Signs of gradients, and a running sum of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("sum", torch.zeros_like(p))
                p.data.add_(kept.add_(p.grad.sign()), alpha=-group["lr"])


class OtherDefaults(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr=lr)


class OtherStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Counting(Plain):
    """Where it counts its steps is not in a tensor."""

    where = "state"

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        p = self.param_groups[0]["params"][0]
        kept: dict[Any, Any] = {"state": self.state[p], "group": self.param_groups[0], "self": vars(self)}[self.where]
        kept["count"] = kept.get("count", 0) + 1


@on_meshes({"fsdp": 2, "tp": 2})
def test_other_classes_that_are_said_to_be_elementwise(mesh: DeviceMesh) -> None:
    start = sf.shard(make_model(), mesh, POLICY)
    for cls, said in (
        (Plain, {"elementwise": True}),
        (OtherStep, {"elementwise": True, "lr": 0.1}),
        (OtherDefaults, {}),
    ):
        reference = make_model()
        given = {name: value for name, value in said.items() if name != "elementwise"}
        train_torch(reference, cls([p for p in reference.parameters() if p.requires_grad], **given), 3)
        opt, params = sfo.from_torch(cls, **said), copied(start)
        params, _ = train(opt, params, opt.init(params), range(3), pure=False)
        assert_parity(full_of(params), detached(reference), tol=1e-13)


@pytest.mark.parametrize("cls", [Plain, OtherStep, Counting])
def test_a_class_that_nobody_knows_is_refused(cls: type[torch.optim.Optimizer]) -> None:
    torch.optim.SGD([torch.ones(1)])  # torch wraps its `step`
    with pytest.raises(
        sf.ShardError, match=rf"nothing is known of {cls.__name__}.* from_torch\({cls.__name__}, element"
    ):
        sfo.from_torch(cls, lr=0.1)


@pytest.mark.parametrize("where", ["state", "group", "self"])
def test_so_is_one_that_counts_outside_of_tensors(where: str) -> None:
    cls = type("Counts", (Counting,), {"where": where})
    with pytest.raises(sf.ShardError, match="Counts counts 'count' = 1, which is no tensor"):
        sfo.from_torch(cls, elementwise=True).init({"w": torch.ones(2)})


# ---------------------------------------------------------------------------------------------------------------------
# Norms


@on_meshes(*MESHES)
def test_norm_is_one_all_reduce(mesh: DeviceMesh) -> None:
    model = make_model()
    params = sf.shard(model, mesh, POLICY)
    full = {name: torch.randn_like(p) for name, p in detached(model).items() if p.is_floating_point()}
    tree = sharded_like(params, {**detached(model), **full})
    expected = torch.cat([x.flatten() for x in full.values()]).norm()
    for given in (tree, dict(tree), {"a": [tree], "step": torch.tensor(1000)}):
        if given is not tree and "a" in given:
            del given["step"]
        with count_collectives() as counts:
            norm = sfo.global_norm(given)
        assert counts.as_dict() == {"all_reduce": 1} and counts.bytes == 8, counts
        assert not isinstance(norm, DTensor) and norm.dtype == F64
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    low = sf.tree.cast(tree, torch.bfloat16)
    full_low = torch.cat([x.bfloat16().float().flatten() for x in full.values()]).norm()
    torch.testing.assert_close(sfo.global_norm(low), full_low, rtol=1e-6, atol=0)
    mixed = low.like({**low, "head.weight": tree["head.weight"]})
    assert sfo.global_norm(mixed).dtype == F64


@on_meshes({"fsdp": 2})
def test_norms_and_products_without_numbers_are_zero(mesh: DeviceMesh) -> None:
    counts = sf.shard({"n": torch.arange(4)}, mesh, sf.Policy())
    for value in (sf.optim.global_norm(counts), sf.tree.dot(counts, counts), sf.optim.clip(counts, 1.0)[1]):
        assert value == 0.0


@on_meshes({"fsdp": 2, "tp": 2})
def test_norm_of_what_lives_on_some_ranks(mesh: DeviceMesh) -> None:
    """One axis only: its own all-reduce, none over the others; equal on all ranks all the same."""
    params = sf.shard(nn.Linear(3, 5), mesh["fsdp"], sf.Policy())
    with count_collectives() as counts:
        norm = sfo.global_norm(params)
    assert counts.as_dict() == {"all_reduce": 1}
    torch.testing.assert_close(norm, torch.cat([x.flatten() for x in sf.gather(params).values()]).norm())


@on_meshes(*MESHES)
def test_clip_equals_torch(mesh: DeviceMesh) -> None:
    model = make_model()
    for max_norm, scale in ((1.0, 1.0), (1e6, 1.0), (math.inf, 1.0), (1.0, 0.0)):
        full = draw_grads(F64, 0, scale)
        for name, p in model.named_parameters():
            p.grad = full[name].clone() if p.requires_grad else None
        expected = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
        params = sf.shard(model, mesh, POLICY)
        grads = sharded_like(params, full)
        before = copied(grads)
        with count_collectives() as counts:
            clipped, norm = sfo.clip(grads, max_norm)
        assert counts.as_dict() == {"all_reduce": 1}
        torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        assert isinstance(clipped, sf.Params) and list(clipped) == list(grads)
        result, untouched = sf.gather(clipped), sf.gather(before)
        for name, p in model.named_parameters():
            want = p.grad if p.grad is not None else untouched[name]
            torch.testing.assert_close(result[name], want, rtol=1e-13, atol=0, equal_nan=True)
            assert torch.equal(unwrap_local(grads["scale"]), unwrap_local(before["scale"]))  # not changed
        updates, _ = sfo.clip_by_global_norm(max_norm).update(grads, (), params)
        assert "frozen.weight" not in updates
        assert all(torch.equal(unwrap_local(updates[name]), unwrap_local(clipped[name])) for name in updates)


@on_meshes(*MESHES)
def test_chain_clips_once_and_steps_fused(mesh: DeviceMesh) -> None:
    model, reference = make_model(), make_model()
    train_torch(reference, torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], 1e-2), 5, clip=1.0)
    opt = sfo.chain(sfo.clip_by_global_norm(1.0), sfo.adamw(1e-2))
    for pure in (False, True):
        params = sf.shard(model, mesh, POLICY)
        with count_collectives() as counts:
            params, state = train(opt, params, opt.init(params), range(5), pure=pure)
        assert counts.as_dict() == {"all_reduce": 5}
        assert_parity(full_of(params), detached(reference), tol=1e-12)  # the norms are added in another order
        assert int(state[1].step) == 5


@on_meshes({"fsdp": 2, "tp": 2})
def test_derivatives_flow_through_update_on_shards(mesh: DeviceMesh) -> None:
    """The gradient of |p + update|^2 with respect to the gradient and the parameter, against one process."""
    model = make_model()
    for make in (lambda: sfo.adamw(1e-2, weight_decay=0.1), lambda: sfo.sgd(0.1, momentum=0.9, weight_decay=0.1)):
        opt, names = make(), ["emb.weight", "head.weight", "norm.weight", "scale"]
        full = {name: detached(model)[name] for name in names}
        grads = {name: draw_grads(F64, 3)[name] for name in names}
        expected = second_order(opt, full, grads)
        params = sf.shard(model, mesh, POLICY).select(names)
        sharded = sharded_like(sf.shard(model, mesh, POLICY), draw_grads(F64, 3)).select(names)
        with count_collectives() as counts:
            found = second_order(opt, params, sharded)
        assert counts.total == 0
        for name in names:
            for ours, theirs in zip(found[name], expected[name], strict=True):
                assert placements(ours) == placements(params[name])
                got = sf.gather(params.like({name: ours}))[name]
                torch.testing.assert_close(got, theirs, rtol=1e-12, atol=1e-14)


def second_order(opt: Optimizer, params: Any, grads: Any) -> dict[str, tuple[Tensor, Tensor]]:
    inputs = {name: (params[name].detach().requires_grad_(), grads[name].detach().requires_grad_()) for name in params}
    like = params.like if isinstance(params, sf.Params) else dict
    weights, pushes = (like({name: pair[i] for name, pair in inputs.items()}) for i in range(2))
    updates, state = opt.update(pushes, opt.init(weights), weights)
    updates, state = opt.update(pushes, state, sfo.apply_updates(weights, updates))
    new = sfo.apply_updates(weights, updates)
    out = {}
    for name, pair in inputs.items():
        seed = (2 * new[name].detach()).contiguous()
        found = torch.autograd.grad(new[name], pair, seed)
        out[name] = (found[0], found[1])
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Errors on ranks: on all of them, before any collective


@on_meshes({"fsdp": 2, "tp": 2})
def test_trees_that_do_not_go_together(mesh: DeviceMesh) -> None:
    params = sf.shard(make_model(), mesh, POLICY)
    places = grid_of(params.mesh, params.plan.roles.storage)
    spec = leaf_spec(params.plan, places, "norm.weight", pending="sum")
    pending = params.like({**params, "norm.weight": wrap_local(unwrap_local(params["norm.weight"]), spec)})
    moved = sf.reshard(params, replace(POLICY, rules={**POLICY.rules, "head.*": "..."}))
    plain = {name: torch.ones(leaf.shape) for name, leaf in params.items()}
    opt, before = sfo.adamw(0.1), copied(params)
    state, moved_state = opt.init(params), opt.init(moved)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (r"global_norm: .* shape \(6,\) is a sum that is still pending", lambda: sfo.global_norm(pending)),
        (r"adamw.step: grads\['norm.weight'\] is a sum that is still p", lambda: opt.step(params, pending, state)),
        (r"(?s)2 problems.*grads\['head.weight'\] has the layout .*reshard", lambda: opt.step(params, moved, state)),
        (r"state.mu\['head.weight'\] has the layout", lambda: opt.step(params, params, moved_state)),
        (r"is a plain tensor, the parameter is a DTensor.* like=params", lambda: opt.update(plain, state, params)),
        ("mixes DTensors and plain tensors", lambda: sfo.global_norm({**params, "more": torch.ones(2)})),
        ("several meshes", lambda: sfo.global_norm([params, sf.shard(nn.Linear(2, 2), mesh["tp"], sf.Policy())])),
    ]
    with count_collectives() as counts:
        for match, call in wrong[:-1]:
            with pytest.raises(sf.ShardError, match=match):
                call()
    assert counts.total == 0
    with pytest.raises(sf.ShardError, match=wrong[-1][0]):
        wrong[-1][1]()
    assert all(torch.equal(unwrap_local(params[name]), unwrap_local(before[name])) for name in params), "half changed"


# ---------------------------------------------------------------------------------------------------------------------
# One process, plain dicts


def test_plain_dicts_equal_torch() -> None:
    for case, (make, _, _) in CASES.items():
        for pure in (False, True):
            opt = make()
            params = {name: p.detach().clone() for name, p in make_model().named_parameters() if p.requires_grad}
            params, _ = train(opt, params, opt.init(params), range(10), pure=pure)
            assert_parity(params, {name: case_by_torch(case)[name] for name in params}, tol=1e-14)


@pytest.mark.parametrize("make", [sfo.adamw, sfo.sgd, sfo.lion, lambda lr: sfo.sgd(lr, momentum=0.9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pure_equals_fused_in_every_dtype(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    opt = make(0.05)
    start = {n: p.detach().clone() for n, p in make_model(dtype).named_parameters() if p.requires_grad}
    fused, state = train(opt, copied(start), opt.init(start), range(3), pure=False)
    pure, pure_state = train(opt, copied(start), opt.init(start), range(3), pure=True)
    ulp = torch.finfo(dtype).eps
    for name, p in fused.items():
        assert p.dtype == pure[name].dtype == dtype
        torch.testing.assert_close(p, pure[name], rtol=4 * ulp, atol=4 * ulp)
    for ours, theirs in zip(state[1:], pure_state[1:], strict=True):
        assert_trees_close({"x": 0.0, **ours}, {"x": 0.0, **theirs}, rtol=4 * ulp, atol=4 * ulp)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_dtype(state_dtype: torch.dtype) -> None:
    """bfloat16 parameters with a float32 state train like float32 ones that are rounded after every step."""
    grads = [torch.randn(40, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    wide = torch.bfloat16 if state_dtype == torch.float32 else torch.float32
    opt = sfo.adamw(0.01, state_dtype=state_dtype)
    params = {"w": torch.ones(40, dtype=wide), "empty": torch.ones(0, dtype=wide)}
    state = opt.init(params)
    twin, twin_state = copied(params), opt.init(params)
    exact, plain = sfo.adamw(0.01), {"w": torch.ones(40)}
    memory = exact.init(plain)
    for grad in grads:
        g = {"w": grad.to(wide), "empty": params["empty"].clone()}
        params, state = opt.step(params, g, state)
        updates, twin_state = opt.update(g, twin_state, twin)
        assert updates["w"].dtype == torch.float32
        twin = sfo.apply_updates(twin, updates)
        plain, memory = exact.step(plain, {"w": grad.to(wide).float()}, memory)
        if wide == torch.bfloat16:
            plain = {"w": plain["w"].to(wide).float()}
        else:
            memory = memory._replace(mu=round_to(memory.mu, state_dtype), nu=round_to(memory.nu, state_dtype))
        assert state.mu["w"].dtype == state.nu["w"].dtype == state_dtype
        torch.testing.assert_close(params["w"].float(), plain["w"], rtol=0, atol=0)
        torch.testing.assert_close(twin["w"], params["w"], rtol=1e-2, atol=0)


def round_to(tree: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: leaf.to(dtype).to(leaf.dtype) for name, leaf in tree.items()}


def test_widened_rows_come_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_CHUNK", 10)
    half = torch.bfloat16
    columns = [
        [*(torch.ones(n, dtype=half) for n in (6, 6, 3, 20, 1)), torch.ones(4, 5, dtype=half).t()] for _ in range(3)
    ]
    sizes = []
    for params, grads, slot in elementwise.in_one_dtype(columns, {"cpu": torch.float32}):
        sizes.append([p.numel() for p in params])
        for p, g, s in zip(params, grads, slot, strict=True):
            assert p.dtype == g.dtype == s.dtype == torch.float32
            p.add_(1)
            s.add_(2)
    assert sizes == [[6], [6, 3], [10], [10], [1], [20]]  # memory in one piece is cut
    assert all((p == 2).all() for p in columns[0]) and all((s == 3).all() for s in columns[2])


SIZES: tuple[tuple[int, ...], ...] = ((3,), (4, 5), (0, 2), (), (16,), (17,), (1, 297))
MAKERS = [sfo.adamw, sfo.sgd, sfo.lion, lambda lr: sfo.sgd(lr, momentum=0.9), clipped_adamw]


def draw_tree(sizes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int, *, together: bool) -> dict[str, Tensor]:
    """Random leaves, side by side in memory or each in its own."""
    generator = torch.Generator().manual_seed(seed)
    leaves = empty_flat(sizes, dtype, torch.device("cpu"))
    leaves = leaves if together else [torch.empty_like(leaf) for leaf in leaves]
    values = [torch.randn(tuple(size), dtype=F64, generator=generator).to(dtype) for size in sizes]
    return {f"p{i}": leaf.copy_(x) for i, (leaf, x) in enumerate(zip(leaves, values, strict=True))}


def rows_of(*trees: Mapping[str, Tensor]) -> int:
    """In how many pieces trees of tensors lie."""
    return len(merged([[unwrap_local(leaf) for leaf in tree.values()] for tree in trees])[0])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_where_leaves_lie_makes_no_difference(make: Callable[[float], Optimizer], dtype: torch.dtype) -> None:
    """To the bit; a vector unit rounds the odd elements at the end of float32 tensors in another way than the rest."""
    for sizes, ulps in (((16, 4), (32,), (0,), (64,)), 0), (SIZES, 4 * (dtype == torch.float32)):
        results = []
        for together in (True, False):
            opt, params = make(0.05), draw_tree(sizes, dtype, 0, together=together)
            state = opt.init(params)
            for seed in range(1, 4):
                params, state = opt.step(params, draw_tree(sizes, dtype, seed, together=together), state)
            assert rows_of(params) == (1 if together else len(sizes) - 1)
            results.append(params)
        assert_trees_close(*results, rtol=ulps * torch.finfo(dtype).eps, atol=ulps * 1e-8)


@pytest.mark.parametrize(("rule", "make"), [("adamw", sfo.adamw), ("sgd", lambda lr: sfo.sgd(lr, momentum=0.9))])
def test_neighbours_are_updated_in_one_call(
    monkeypatch: pytest.MonkeyPatch, rule: str, make: Callable[[float], Optimizer]
) -> None:
    kernel = f"_fused_{rule}_"
    calls, real = [], getattr(torch, kernel)

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        calls.append([p.numel() for p in params])
        return real(params, *args, **kwargs)

    monkeypatch.setattr(torch, kernel, counted)
    params, grads = (draw_tree(SIZES, torch.float32, seed, together=True) for seed in range(2))
    opt = make(0.1)
    state = opt.init(params)
    opt.step(params, grads, state)
    apart = {**grads, "p4": grads["p4"].clone()}  # one gradient lies elsewhere
    opt.step(params, apart, state)
    params["p1"] = params["p1"].clone()  # one parameter was replaced
    opt.step(params, grads, state)
    assert calls == [[354], [24, 16, 314], [3, 20, 331]]
    frozen = {**params, "p4": torch.arange(16)}
    assert rows_of(opt.init(frozen)[1]) == 4, "what the parameters are not, their state is not"


def test_state_lies_in_memory_as_its_parameters() -> None:
    params = draw_tree(SIZES, torch.float32, 0, together=True)
    for opt in (sfo.adamw(0.1), sfo.adamw(0.1, state_dtype=torch.float64), sfo.adamw(0.1, groups=LAST_TWO)):
        state = opt.init(params)
        assert rows_of(params, state.mu, state.nu) == 1 and list(state.mu) == list(params)
        assert all(state.mu[name].shape == leaf.shape for name, leaf in params.items())
        assert not any(leaf.any() for leaf in pytree.tree_leaves(state))
    momentum = sfo.sgd(0.1, groups={"p{5,6}": {"momentum": 0.9}}).init(params).momentum
    assert list(momentum) == ["p5", "p6"] and rows_of(momentum) == 1
    turned = {"a": torch.ones(4, 6).t(), "b": torch.ones(2)}
    assert sfo.adamw(0.1).init(turned).mu["a"].stride() == (1, 6)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("together", [True, False])
def test_a_step_counts_as_a_change(make: Callable[[float], Optimizer], together: bool) -> None:
    """A backward after the step must not take the new values for those of the forward."""
    params = draw_tree(SIZES, torch.float32, 0, together=together)
    grads, opt = draw_tree(SIZES, torch.float32, 1, together=together), make(0.1)
    state = opt.init(params)
    before = [version_of(leaf) for leaf in params.values() if leaf.numel()]
    weights = {name: leaf.requires_grad_() for name, leaf in params.items()}
    loss = torch.stack([leaf.square().sum() for leaf in weights.values()]).sum()
    opt.step(weights, grads, state)
    after = [version_of(leaf) for leaf in params.values() if leaf.numel()]
    assert all(x > y for x, y in zip(after, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_meshes({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2})
def test_shards_side_by_side(mesh: DeviceMesh) -> None:
    """Parameters and gradients in one storage each: clipping keeps them so, and results are those of separate ones."""
    separate = sf.tree.map(torch.clone, sf.shard(make_model(), mesh, POLICY))
    trains = [name for name in separate if separate.plan.leaves[name][0].trainable]
    together, results = side_by_side(separate), []
    for params in (separate, together):
        opt = sfo.chain(sfo.clip_by_global_norm(0.5), sfo.adamw(0.01))
        state = opt.init(params)
        versions = [version_of(unwrap_local(params[name])) for name in trains]
        for step in range(3):
            grads = sharded_like(params, draw_grads(F64, step))
            grads = side_by_side(grads) if params is together else grads
            with count_collectives() as counts:
                clipped, norm = sfo.clip(grads, 0.5)
            assert counts.as_dict() == {"all_reduce": 1}
            params, state = opt.step(params, grads, state)
            assert rows_of(clipped.select(trains)) == rows_of(grads.select(trains))
            results.append((norm, clipped))
        assert rows_of(params.select(trains), state[1].mu, state[1].nu) == rows_of(params.select(trains))
        now = [version_of(unwrap_local(params[name])) for name in trains]
        assert all(x > y for x, y in zip(now, versions, strict=True))
    assert rows_of(together.select(trains)) <= 3 < rows_of(separate.select(trains))  # what does not train lies between
    assert_parity(full_of(together), full_of(separate), tol=1e-14)
    for (norm, clipped), (other_norm, other) in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(norm, other_norm, rtol=1e-14, atol=0)
        for name in trains:
            torch.testing.assert_close(unwrap_local(clipped[name]), unwrap_local(other[name]), rtol=1e-13, atol=0)


def side_by_side(params: sf.Params) -> sf.Params:
    """The same shards in one storage a dtype."""
    moved = {}
    for dtype in (F64, torch.int64):
        names = [name for name, leaf in params.items() if leaf.dtype == dtype]
        shards = [unwrap_local(params[name]) for name in names]
        parts = empty_flat([shard.shape for shard in shards], dtype, torch.device("cpu"))
        for name, shard, part in zip(names, shards, parts, strict=True):
            moved[name] = with_local(params[name], part.copy_(shard))
    return params.like({name: moved[name] for name in params})


@on_meshes({"fsdp": 1})
def test_norm_of_many_elements(mesh: DeviceMesh) -> None:
    """float32 sums on a CPU lose digits in long tensors: 6e-4 of this norm, were it added in one go."""
    weight = sf.shard({"w": torch.ones(2**24).uniform_(generator=torch.Generator().manual_seed(0))}, mesh, sf.Policy())
    exact = unwrap_local(weight["w"]).double().norm()
    assert abs(sfo.global_norm(weight).item() / exact.item() - 1) < 2e-6


@pytest.mark.parametrize("make", [sfo.adamw, sfo.lion, lambda lr: sfo.sgd(lr, momentum=0.9)])
def test_strides_do_not_matter(make: Callable[..., Optimizer]) -> None:
    """torch's fused CPU kernels walk memory and ignore strides: a transposed gradient would be a wrong number."""
    torch.manual_seed(0)
    values, grad = torch.randn(4, 6, dtype=F64), torch.randn(4, 6, dtype=F64)
    results = []
    for weights in (values.clone(), values.t().contiguous().t()):
        for push in (grad.clone(), grad.t().contiguous().t(), grad[:1].expand(4, 6)):
            opt, params = make(0.1), {"w": weights.clone(memory_format=torch.preserve_format)}
            params, _ = opt.step(params, {"w": push}, opt.init(params))
            updates, _ = opt.update({"w": push}, opt.init(params), {"w": values})
            torch.testing.assert_close(params["w"], values + updates["w"], rtol=1e-13, atol=1e-15)
            results.append(params["w"])
    torch.testing.assert_close(results[0], results[4], rtol=1e-13, atol=1e-15)


def test_lion_by_its_formula() -> None:
    opt = sfo.lion(0.1, b1=0.9, b2=0.8, weight_decay=0.5, groups={"b": {"b1": 0.0}})
    params = {"a": torch.tensor([1.0, 1.0], dtype=F64), "b": torch.tensor([1.0], dtype=F64)}
    state = opt.init(params)
    steps = [{"a": torch.tensor([1.0, -2.0], dtype=F64), "b": torch.tensor([2.0], dtype=F64)}]
    steps.append({"a": torch.tensor([-1.0, 0.1], dtype=F64), "b": torch.tensor([-0.1], dtype=F64)})
    for grads in steps:
        params, state = opt.step(params, grads, state)
    # a: mu 0.2, -0.4 after one step; directions +1, -1, then sign(0.9 mu + 0.1 g) = +1, -1. b: +1, then sign(g) = -1.
    expected = {"a": [0.95 * (0.95 - 0.1) - 0.1, 0.95 * (0.95 + 0.1) + 0.1], "b": [0.95 * (0.95 - 0.1) + 0.1]}
    for name, values in expected.items():
        torch.testing.assert_close(params[name], torch.tensor(values, dtype=F64))
    torch.testing.assert_close(state.mu["a"], torch.tensor([0.16 - 0.2, -0.32 + 0.02], dtype=F64))


def test_learning_rates_that_change() -> None:
    reference = {"w": nn.Parameter(torch.ones(3, dtype=F64))}
    theirs = torch.optim.AdamW(reference.values(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lr_of)
    grads = [torch.randn(3, dtype=F64, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    for grad in grads:
        reference["w"].grad = grad
        theirs.step()
        scheduler.step()
    options: list[Optimizer] = [sfo.adamw(lr_of), sfo.from_torch(torch.optim.AdamW, lr=lr_of)]
    options.append(sfo.adamw(7.0, groups={"w": {"lr": lr_of}}))
    options.append(sfo.chain(sfo.adamw(1.0), sfo.schedule(lr_of)))
    for opt in options:
        for pure in (False, True):
            params = {"w": torch.ones(3, dtype=F64)}
            state = opt.init(params)
            for grad in grads:
                if pure:
                    updates, state = opt.update({"w": grad}, state, params)
                    params = sfo.apply_updates(params, updates)
                else:
                    params, state = opt.step(params, {"w": grad}, state)
            torch.testing.assert_close(params["w"], reference["w"].detach(), rtol=1e-13, atol=0)


def test_warmup_cosine() -> None:
    rate = sfo.warmup_cosine(2.0, warmup=2, total=10, floor=0.5)
    assert [rate(0), rate(1), rate(2), rate(6), rate(10), rate(11)] == [1.0, 2.0, 2.0, 1.25, 0.5, 0.5]
    assert sfo.warmup_cosine(1.0, 0, 1)(0) == 1.0 and sfo.warmup_cosine(1.0, 3, 3)(3) == 0.0
    for peak, warmup, total, floor in ((1, 5, 4, 0), (1, -1, 4, 0), (-1, 0, 4, 0), (1, 0, 0, 0), (1, 1, 4, 2)):
        with pytest.raises(ValueError, match="warmup_cosine"):
            sfo.warmup_cosine(peak, warmup, total, floor)


def test_masked_leaves_the_others_alone() -> None:
    params = {"a.w": torch.ones(2), "a.b": torch.ones(2), "c": torch.ones(2)}
    grads = {name: torch.full((2,), 3.0) for name in params}
    for mask in ("a.*", ["a.w", "a.b"]):
        opt, own = sfo.masked(sfo.adamw(0.5), mask), copied(params)
        state = opt.init(own)
        assert list(state.mu) == ["a.w", "a.b"]
        updates, _ = opt.update(grads, state, own)
        pure = sfo.apply_updates(own, updates)
        after, state = opt.step(own, grads, state)
        assert after is own and torch.equal(own["c"], torch.ones(2)) and pure["c"] is own["c"]
        assert_trees_close(pure, own)
        assert not torch.equal(own["a.b"], torch.ones(2))
    # A masked member of a chain passes the others on; the last member decides what is updated.
    opt = sfo.chain(sfo.masked(sfo.clip_by_global_norm(1.0), "c"), sfo.sgd(1.0))
    new, _ = opt.step(copied(params), grads, opt.init(params))
    assert new["a.w"].tolist() == [-2.0, -2.0]
    assert math.isclose(new["c"].sub(1).norm().item(), 1.0, rel_tol=1e-5)


def test_update_is_pure() -> None:
    """Neither parameters, nor gradients, nor the state change, and the same call gives the same answer."""
    params = {"w": torch.linspace(-1, 1, 6).view(2, 3), "b": torch.ones(3)}
    grads = {"w": torch.ones(2, 3), "b": torch.tensor([3.0, -0.1, 0.0])}
    makers = [sfo.adamw(0.1), sfo.sgd(0.1, momentum=0.9, nesterov=True), sfo.lion(0.1)]
    makers += [sfo.from_torch(cls, **kwargs) for cls, kwargs in TORCH_CLASSES]
    makers += [sfo.masked(sfo.adamw(0.1), "w"), sfo.chain(sfo.clip_by_global_norm(0.1), sfo.schedule(lr_of))]
    for opt in makers:
        _, state = opt.step(copied(params), copied(grads), opt.init(params))
        everything = pytree.tree_leaves([params, grads, state])
        before = [leaf.clone() for leaf in everything]
        first = opt.update(grads, state, params)
        again = opt.update(grads, state, params)
        assert all(torch.equal(x, y) for x, y in zip(everything, before, strict=True))
        pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(again), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_plain_norms_communicate_nothing_and_are_differentiable() -> None:
    tree = {"a": torch.tensor([3.0], requires_grad=True), "b": (torch.tensor([[4.0]]), None, "text")}
    norm = sfo.global_norm(tree)
    norm.backward()
    assert norm.item() == 5.0 and math.isclose(tree["a"].grad.item(), 0.6, rel_tol=1e-6)
    assert sfo.global_norm({}).item() == 0.0
    assert sfo.global_norm({"a": torch.ones(0), "b": torch.tensor(2)}).item() == 0.0
    assert sfo.global_norm({"a": torch.tensor([3 + 4j])}).item() == 5.0
    # Halves are added in float32: 10000 times 1 is 100 squared, which bfloat16 cannot count to.
    assert sfo.global_norm({"a": torch.ones(10_000, dtype=torch.bfloat16)}).item() == 100.0


def test_clip_with_what_is_not_finite() -> None:
    """As torch does it: an infinite norm gives zeros (and nan for inf * 0), a nan makes everything nan."""
    for bad, kept in ((math.inf, 0.0), (math.nan, math.nan)):
        grads = {"a": torch.tensor([bad, 1.0]), "b": torch.ones(2, dtype=torch.bfloat16)}
        twins = [nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
        for twin, grad in zip(twins, grads.values(), strict=True):
            twin.grad = grad.clone()
        nn.utils.clip_grad_norm_(twins, 1.0)
        clipped, norm = sfo.clip(grads, 1.0)
        assert not math.isfinite(norm.item()) and clipped["b"].dtype == torch.bfloat16
        torch.testing.assert_close(clipped["a"], twins[0].grad, equal_nan=True)
        torch.testing.assert_close(clipped["b"], torch.full((2,), kept, dtype=torch.bfloat16), equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------------
# Transforms through `update`


def inner(opt: Optimizer, start: dict[str, Tensor], x: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """A few steps of learning, by torch.func."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        return (torch.tanh(x @ params["w"]) + params["b"]).square().mean()

    params, state = start, opt.init(start)
    for _ in range(steps):
        updates, state = opt.update(torch.func.grad(loss)(params), state, params)
        params = sfo.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("make", [lambda: sfo.adamw(0.05), lambda: sfo.sgd(0.1, momentum=0.9, nesterov=True)])
def test_meta_gradients_equal_finite_differences(make: Callable[[], Optimizer]) -> None:
    torch.manual_seed(0)
    start = {"w": torch.randn(3, 2, dtype=F64), "b": torch.randn(2, dtype=F64)}
    x = torch.randn(5, 3, dtype=F64)

    def outer(w: Tensor) -> Tensor:
        opt = sfo.chain(sfo.clip_by_global_norm(10.0), make())
        return inner(opt, {"w": w, "b": start["b"]}, x)["w"].square().sum()

    assert torch.autograd.gradcheck(outer, (start["w"].requires_grad_(),), atol=1e-6)
    by_func = torch.func.grad(outer)(start["w"].detach())
    torch.testing.assert_close(by_func, torch.autograd.grad(outer(start["w"]), start["w"])[0])
    tasks = torch.randn(4, 5, 3, dtype=F64)
    plain = {name: leaf.detach() for name, leaf in start.items()}
    many = torch.func.vmap(lambda x: inner(sfo.chain(sfo.clip_by_global_norm(1.0), make()), plain, x)["w"])(tasks)
    for got, task in zip(many, tasks, strict=True):
        torch.testing.assert_close(got, inner(sfo.chain(sfo.clip_by_global_norm(1.0), make()), plain, task)["w"])


def test_derivative_at_a_zero_gradient_is_not_nan() -> None:
    grad = torch.zeros(2, dtype=F64, requires_grad=True)
    opt, params = sfo.adamw(0.1, eps=0.5), {"w": torch.ones(2, dtype=F64)}
    updates, _ = opt.update({"w": grad}, opt.init(params), params)
    (found,) = torch.autograd.grad(updates["w"].sum(), grad)
    torch.testing.assert_close(found, torch.full((2,), -0.1 / 0.5, dtype=F64))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_bad_options() -> None:
    loose: Any = sfo  # the calls below are wrong for type checkers too
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "adamw: lr=-1 must be a finite number", lambda: loose.adamw(-1)),
        (ValueError, "lr=nan", lambda: loose.adamw(math.nan)),
        (TypeError, "lr='x' must be a finite number from 0 up, or a callable", lambda: loose.adamw("x")),
        (ValueError, "b2=1.0 must be from 0 up to", lambda: loose.adamw(1e-3, b2=1.0)),
        (ValueError, "weight_decay=-0.1", lambda: loose.sgd(1e-3, weight_decay=-0.1)),
        (ValueError, "nesterov=True needs a momentum", lambda: loose.sgd(1e-3, nesterov=True)),
        (TypeError, "nesterov=1 is not True or False", lambda: loose.sgd(1e-3, 0.9, nesterov=1)),
        (ValueError, "groups.'a'. has no option 'weigth_decay'; did you mean 'weight_decay'", group_typo),
        (ValueError, "groups.'a'.: lr=-2.0", lambda: loose.lion(1e-3, groups={"a": {"lr": -2.0}})),
        (ValueError, "groups.'a'.: nesterov=True needs", lambda: loose.sgd(1e-3, groups={"a": {"nesterov": True}})),
        (TypeError, "groups.'a'. is 0.1; write the options", lambda: loose.sgd(1e-3, groups={"a": 0.1})),
        (TypeError, "groups=.* takes a mapping", lambda: loose.sgd(1e-3, groups=["a"])),
        (sf.ShardError, "bad pattern", lambda: loose.sgd(1e-3, groups={"a{": {}})),
        (TypeError, "state_dtype=torch.int32", lambda: loose.adamw(1e-3, state_dtype=torch.int32)),
        (ValueError, "max_norm=0 is not a positive number", lambda: loose.clip_by_global_norm(0)),
        (ValueError, "max_norm=nan", lambda: loose.clip({"a": torch.ones(1)}, math.nan)),
        (TypeError, "schedule: expected a callable", lambda: loose.schedule(0.1)),
        (ValueError, "chain: name at least one", lambda: loose.chain()),
        (TypeError, "chain: .* wrap a torch class in from_torch", lambda: loose.chain(torch.optim.Adam)),
        (TypeError, "masked: the mask is a int", lambda: loose.masked(loose.sgd(1), 3)),
        (TypeError, "from_torch: expected a class", lambda: loose.from_torch("adam")),
        (
            TypeError,
            "Adam has no option 'bettas'; did you mean 'betas'",
            lambda: loose.from_torch(torch.optim.Adam, bettas=1),
        ),
        (ValueError, "Invalid learning rate", lambda: loose.from_torch(torch.optim.Adam, lr=-1.0)),
        (ValueError, "differentiable=True", lambda: loose.from_torch(torch.optim.Adam, differentiable=True)),
        (sf.ShardError, "LBFGS cannot run on shards: it needs a closure", lambda: loose.from_torch(torch.optim.LBFGS)),
        (sf.ShardError, "SparseAdam cannot run on shards", lambda: loose.from_torch(torch.optim.SparseAdam)),
    ]
    for kind, match, make in wrong:
        with pytest.raises(kind, match=match):
            make()


def group_typo() -> Optimizer:
    return sfo.adamw(1e-3, groups={"a": {"weigth_decay": 0.0}})


@on_meshes({"fsdp": 2})
def test_trees_of_two_layouts_inside_a_transform(mesh: DeviceMesh) -> None:
    model = torch.nn.Linear(4, 2)
    params, other = (sf.shard(model, mesh, sf.Policy(default=way)) for way in ("auto", "replicate"))

    def stepped(p: sf.Params) -> sf.Params:
        return sfo.apply_updates(p, other)

    with pytest.raises(sf.ShardError, match=r"updates\['weight'\] has layout .*; sf.reshard one of the trees before"):
        sf.jvp(stepped, (params,), (params,))


def test_bad_trees() -> None:
    params = {"a.w": torch.ones(2), "a.b": torch.ones(2)}
    grads = {name: torch.ones(2) for name in params}
    opt: Any = sfo.adamw(0.1)
    state = opt.init(params)
    falling = sfo.sgd(lambda step: -1.0 if step else 1.0)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "params is a list", lambda: opt.init([torch.ones(1)])),
        (TypeError, r"params\['a'\] is a dict; a tree is flat", lambda: opt.init({"a": params})),
        (TypeError, "is complex", lambda: opt.init({"a": torch.ones(1, dtype=torch.complex64)})),
        (sf.ShardError, "none of 1 parameters trains", lambda: opt.init({"a": torch.arange(2)})),
        (sf.ShardError, "groups: 'a.u' matches no parameter; did you mean", lambda: dead_group("a.u").init(params)),
        (sf.ShardError, "masked: 'b.*' matches no", lambda: sfo.masked(opt, ["a.*", "b.*"]).init(params)),
        (
            sf.ShardError,
            r"grads has no leaf 'a.b'; did you mean",
            lambda: opt.step(params, {"a.w": grads["a.w"]}, state),
        ),
        (sf.ShardError, "grads has 'c', which is no", lambda: opt.update({**grads, "c": grads["a.w"]}, state, params)),
        (sf.ShardError, r"'a.b'\] has shape \(3,\)", lambda: opt.step(params, {**grads, "a.b": torch.ones(3)}, state)),
        (sf.ShardError, "is None, not a tensor; write zeros", lambda: opt.step(params, {**grads, "a.b": None}, state)),
        (TypeError, "grads is a list", lambda: opt.step(params, [1], state)),
        (TypeError, "the state is a tuple, not what adamw.init", lambda: opt.step(params, grads, ())),
        (
            sf.ShardError,
            "state.mu has no leaf 'a.b'",
            lambda: opt.step(params, grads, opt.init({"a.w": params["a.w"]})),
        ),
        (TypeError, "chain: expected a tuple of 2 states", lambda: sfo.chain(opt, opt).step(params, grads, state)),
        (TypeError, "not what from_torch", lambda: sfo.from_torch(torch.optim.Adam).step(params, grads, state)),
        (sf.ShardError, "updates has 'c'", lambda: sfo.apply_updates(params, {"c": torch.ones(2)})),
        (ValueError, r"sgd.step: lr\(1\) is -1.0", lambda: steps(falling, params, grads, 2)),
        (sf.ShardError, "from_torch.update has no derivative", lambda: torch_update_with_grad(params)),
    ]
    for kind, match, make in wrong:
        before = copied(params)
        with pytest.raises(kind, match=match):
            make()
        if "lr" not in match:
            assert_trees_close(params, before, rtol=0, atol=0)


def dead_group(pattern: str) -> Optimizer:
    return sfo.adamw(0.1, groups={pattern: {"lr": 0.2}})


def steps(opt: Optimizer, params: dict[str, Tensor], grads: dict[str, Tensor], count: int) -> None:
    state = opt.init(params)
    for _ in range(count):
        params, state = opt.step(params, grads, state)


def torch_update_with_grad(params: dict[str, Tensor]) -> None:
    opt = sfo.from_torch(torch.optim.SGD)
    opt.update({name: leaf.clone().requires_grad_() for name, leaf in params.items()}, opt.init(params), params)


def test_namespaces() -> None:
    from shardfn import collectives, data, optim, tree
    from shardfn.comm import collectives as core_collectives
    from shardfn.params import batches as core_data
    from shardfn.params import tree as core_tree

    for name in "adamw sgd lion chain clip clip_by_global_norm masked schedule from_torch global_norm".split():
        assert getattr(optim, name) is getattr(sfo, name)
    assert tree.ema is core_tree.ema and data.rank is core_data.rank and collectives.psum is core_collectives.psum


def test_a_state_that_is_used_again_goes_on() -> None:
    for make in (
        sfo.adamw,
        sfo.lion,
        lambda lr: sfo.sgd(lr, momentum=0.9),
        lambda lr: sfo.adamw(lambda step: lr / 2**step),
        lambda lr: sfo.from_torch(torch.optim.AdamW, lr=lr),
        lambda lr: sfo.from_torch(torch.optim.RMSprop, lr=lr, momentum=0.9),
    ):
        opt, found = make(0.1), []
        for keeps in (False, True):
            params: Any = {"w": torch.ones(3)}
            state = opt.init(params)
            for _ in range(3):
                after = opt.step(params, {"w": params["w"].clone()}, state)[1]
                state = after if keeps else state
            found.append((params["w"], state.step))
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert found[0][1] == 3
