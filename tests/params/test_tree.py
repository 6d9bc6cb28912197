"""`Params` as a dict and as a pytree, and functions over trees."""

import copy
import pickle
from typing import Any

import pytest
import torch
from drawing import as_dtensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import shardfn as sf
from shardfn._torch import unwrap_local
from shardfn.params import tree as sft
from shardfn.testing import count_collectives, on_meshes, run

POLICY = sf.Policy(rules={"0.weight": "o@tp c@fsdp"})


def make_params(mesh: DeviceMesh, policy: sf.Policy = POLICY) -> sf.Params:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    model.register_buffer("steps", torch.arange(3))
    return sf.shard(model, mesh, policy)


def assert_like(got: Any, params: sf.Params) -> None:
    assert type(got) is sf.Params and got.plan is params.plan and got.mesh is params.mesh
    for name, leaf in params.items():
        assert as_dtensor(got[name]).placements == as_dtensor(leaf).placements and got[name].shape == leaf.shape


@on_meshes()
def test_functions_keep_the_type_and_the_layout(mesh: DeviceMesh) -> None:
    params = make_params(mesh)
    full = sf.gather(params)
    with count_collectives() as counts:
        doubled = pytree.tree_map(lambda leaf: 2 * leaf, params)
        added = sft.map(torch.add, params, doubled)
        local = sft.map_local(torch.add, params, doubled)
        middle = sft.lerp(params, doubled, 0.5)
        average = sft.ema(params, doubled, decay=0.75)
        zeros = sft.zeros_like(params, dtype=torch.float64)
        half = sft.cast(params, torch.bfloat16)
    assert counts.total == 0
    for tree, factor in ((doubled, 2), (added, 3), (local, 3), (middle, 1.5), (average, 1.25)):
        assert_like(tree, params)
        for name, tensor in sf.gather(tree).items():
            torch.testing.assert_close(tensor, factor * full[name])
    assert_like(zeros, params)
    assert all(leaf.dtype == torch.float64 and not unwrap_local(leaf).any() for leaf in zeros.values())
    assert {leaf.dtype for leaf in half.values()} == {torch.bfloat16} and half.plan is params.plan
    assert sf.gather(half)["0.weight"].dtype == torch.bfloat16


def dict_functions_on_a_rank() -> None:
    mesh = sf.make_mesh("cpu", fsdp=2, tp=1)
    params = make_params(mesh)
    assert list(params) == ["0.weight", "0.bias", "1.weight", "1.bias"] == sft.paths(params)
    part = params.select("1.*")
    assert (
        list(part) == ["1.weight", "1.bias"]
        and part.plan is params.plan
        and part.buffers["steps"] is params.buffers["steps"]
    )
    assert list(sft.select(params, ["0.weight", "1.b*"])) == ["0.weight", "1.bias"]
    with pytest.raises(KeyError, match=r"select: '2.\*' matches none of 0.weight, 0.bias"):
        params.select(["1.*", "2.*"])
    zeros = sft.zeros_like(part)
    for merged in (params | zeros, params | dict(zeros), dict(params) | zeros):
        assert (
            list(merged) == list(params)
            and merged["1.bias"] is zeros["1.bias"]
            and merged["0.bias"] is params["0.bias"]
        )
    assert type(params | zeros) is type(params | dict(zeros)) is sf.Params
    assert (zeros | params)["1.bias"] is params["1.bias"]
    other = make_params(mesh, sf.Policy())
    with pytest.raises(
        sf.ShardError,
        match=r"params \| other: the layouts differ; reshard one of them\n0.weight: o@tp c@fsdp -> 8@fsdp 6",
    ):
        _ = params | other
    with pytest.raises(sf.ShardError, match=r"the model has no '0.weights'; did you mean '0.weight'"):
        _ = params | {"0.weights": torch.ones(1)}
    twin = copy.deepcopy(params)
    unwrap_local(twin["0.bias"]).fill_(7)
    twin.buffers["steps"].fill_(7)
    assert not (unwrap_local(params["0.bias"]) == 7).any() and params.buffers["steps"].tolist() == [0, 1, 2]
    shallow = params.copy()
    assert type(shallow) is sf.Params and shallow["0.bias"] is params["0.bias"] and shallow is not params
    back = pickle.loads(pickle.dumps(params))
    assert type(back) is sf.Params and back.plan == params.plan and back.mesh == params.mesh
    assert torch.equal(sf.gather(back)["0.weight"], sf.gather(params)["0.weight"])
    assert repr(params).startswith("Params on fsdp=2, tp=1, 4 leaves\n  0.weight: o@tp c@fsdp\n  0.bias: ")


def test_params_is_a_dict() -> None:
    run(dict_functions_on_a_rank, ranks=2)


def mismatches_on_a_rank() -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
    params = make_params(mesh)
    for other, match in (
        (params.select("1.*"), "tree.map: 2 leaves are in one tree only, for example '0.bias'"),
        (params.like(reversed(list(params.items()))), "tree.map: the leaves stand in another order"),
        (
            make_params(mesh, sf.Policy()),
            r"tree.map: the layouts differ; reshard one of them\n0.weight: o@tp c@fsdp -> ",
        ),
        (dict(params), r"tree.map: one is a tree of shards, another a dict; tree \| \{name: "),
        ([1], "tree.map: one is a tree of shards, another a list"),
    ):
        with pytest.raises(sf.ShardError, match=match):
            sft.map(torch.add, params, other)
    with pytest.raises(ValueError, match="of my own") as caught:
        sft.map(raises, params)
    assert not isinstance(caught.value, sf.ShardError)
    for name, match in {
        "cuda": r"Params has no 'cuda': shards live on their mesh's device; make the mesh there, or gather\(params, to",
        "to": "shards live on their mesh's device",
        "half": r"use sf.tree.cast\(params, dtype\)",
        "parameters": r"use params.values\(\)",
        "state_dict": r"use sf.gather\(params\)",
        "requires_grad_": "use sf.value_and_grad",
        "train": "call it on the model",
        "size": r"lambda p, x, y: F\.mse_loss\(sf\.apply\(model, p, x\), y\)",
        "nonsense": "Params has no attribute 'nonsense'",
    }.items():
        with pytest.raises(AttributeError, match=match):
            getattr(params, name)
    assert not hasattr(params, "shape")


def raises(leaf: torch.Tensor) -> None:
    raise ValueError("of my own")


def test_mismatches_and_what_to_use_instead() -> None:
    run(mismatches_on_a_rank, ranks=1)


def contexts_on_a_rank() -> None:
    mesh = sf.make_mesh("cpu", fsdp=1, tp=1)
    one, two = make_params(mesh), make_params(mesh)
    two.buffers["steps"] += 1
    _, a = pytree.tree_flatten(one)
    _, b = pytree.tree_flatten(two)
    assert a == b and hash(a.context) == hash(b.context), "buffers take no part"
    _, c = pytree.tree_flatten(make_params(mesh, sf.Policy()))
    assert a != c, "the plan does"
    nested = {"mu": one, "step": torch.zeros(())}
    assert sft.paths(nested)[0] == "mu.0.weight" and sft.paths(nested)[-1] == "step"
    assert len(list(sft.leaves({"a": one, "b": 3}))) == 4
    doubled = sft.map(lambda x: x * 2, nested)
    assert type(doubled["mu"]) is sf.Params


def test_params_in_a_pytree() -> None:
    run(contexts_on_a_rank, ranks=1)


def test_trees_of_plain_tensors() -> None:
    tree = {"a": torch.ones(2), "b": torch.tensor([1, 2])}
    assert sft.lerp(tree, {"a": torch.zeros(2), "b": torch.tensor([3, 4])}, 0.25)["b"].tolist() == [3, 4], (
        "integers are the end's"
    )
    assert sft.cast(tree, torch.float16)["b"].dtype == torch.int64
    assert sft.cast(tree, torch.float32)["a"] is not tree["a"], "or an optimizer's step would change an average"
    assert sft.zeros_like(tree)["a"].tolist() == [0, 0] and list(sft.select(tree, "b")) == ["b"]
    assert sft.paths([torch.ones(1), (torch.ones(1),)]) == ["0", "1.0"]


def test_map_local_keeps_gradients() -> None:
    params = sf.shard({"w": torch.arange(3.0)}, sf.make_mesh("cpu", fsdp=1), sf.Policy())
    working = sf.tree.map(lambda leaf: leaf.requires_grad_(), params)
    average = sf.tree.lerp(sf.tree.zeros_like(params), working, 0.25)
    average["w"].sum().full_tensor().backward()
    assert working["w"].grad.full_tensor().tolist() == [0.25] * 3


def test_plain_tensors_among_leaves_say_what_to_write() -> None:
    params = sf.shard({"w": torch.arange(3.0)}, sf.make_mesh("cpu", fsdp=1), sf.Policy())
    stacked, weights = sf.tree.map(lambda w: torch.stack([w, 2 * w]), params), torch.tensor([1.0, 3.0])
    with pytest.raises(sf.ShardError, match=r"(?s)tree\.map: the function mixes .* a stack: sf\.vmap"):
        sf.tree.map(lambda w: weights[:, None] * w, stacked)
    scaled = sf.vmap(lambda x, p: sf.tree.map(lambda w: x * w, p))(weights, stacked)
    assert sf.gather(scaled)["w"].tolist() == [[0, 1, 2], [0, 6, 12]]
    joined: Any = {**params}
    with pytest.raises(TypeError, match=r"got dict; write .*a \| b joins them, sf\.tree\.map\(lambda p, g"):
        sf.apply(torch.nn.Linear(2, 2), joined, torch.ones(1, 2))


SQUARE = sf.Policy(rules={"0.weight": "o@tp c@fsdp", "1.weight": "o@fsdp c@tp"})
OTHER_LAYOUTS = {
    "transpose": torch.t,
    "cumsum": lambda w: w.cumsum(0),
    "flip": lambda w: w.flip(0),
    "roll": lambda w: w.roll(1, 0),
    "softmax": lambda w: w.softmax(0),
    "sort": lambda w: w.sort(0)[0],
    "cube": lambda w: w @ w.T @ w if w.dim() == 2 else w,
}


def squares(mesh: DeviceMesh) -> tuple[nn.Module, sf.Params, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    return model, sf.shard(model, mesh, SQUARE), torch.randn(8, 8, dtype=torch.float64)


@on_meshes()
def test_noise_is_that_of_one_process(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    params = make_params(mesh)
    full = sf.gather(params)
    ways: tuple[Any, ...] = (
        torch.randn_like,
        lambda w: w + 0.1 * torch.rand_like(w),
        lambda w: torch.bernoulli(torch.sigmoid(w)),
        lambda w: torch.zeros_like(w).normal_(),
        lambda w: nn.functional.dropout(w, 0.5),
    )
    for way in ways:
        torch.manual_seed(2)
        want = sft.map(way, full)
        torch.manual_seed(2)
        noise = sft.map(way, params)
        assert_like(noise, params)
        for name, value in sf.gather(noise).items():
            assert torch.equal(value, want[name]), name


@on_meshes({"fsdp": 2})
def test_gradients_of_samples_do_not_go_with_parameters(mesh: DeviceMesh) -> None:
    model = nn.Linear(3, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    params = sf.shard(model, mesh, sf.Policy())
    each = sf.vmap(sf.grad(lambda p, x: sf.apply(model, p, x).sum()), in_dims=(None, 0))(params, torch.ones(4, 3))
    with pytest.raises(sf.ShardError, match=r"a gradient for each sample: sf.reduce_grads\(.*like=params"):
        sft.map(lambda w, g: w - g.mean(0), params, each)
    total = sf.reduce_grads(sft.map(lambda g: g.sum(0), each), like=params)
    assert sf.gather(sft.map(torch.sub, params, total))["bias"].tolist() == [-3.0, -3.0]


def noise_in_transforms() -> None:
    params = make_params(sf.make_mesh("cpu", fsdp=2, tp=2))
    ways: tuple[Any, ...] = (
        lambda p: sft.map(torch.randn_like, p),
        lambda p: sft.map(lambda w: w + torch.randn(w.shape), p),
        lambda p: {"w": torch.rand_like(p["0.weight"])},
    )
    for way in ways:
        with pytest.raises(sf.ShardError, match=r"draw the same numbers for the parts of '0.weight'.*noise ="):
            sf.jvp(lambda p, way=way: sum(x.sum() for x in way(p).values()), (params,), (params,))
    noise = sft.map(torch.randn_like, params)
    sf.jvp(lambda p: sft.map(torch.add, p, noise), (params,), (params,))


def test_noise_inside_of_a_transform_is_drawn_outside() -> None:
    run(noise_in_transforms, ranks=4)


@on_meshes()
def test_what_has_another_layout_is_put_into_that_of_the_leaf(mesh: DeviceMesh) -> None:
    model, params, x = squares(mesh)
    (part,) = sf.data.local_batch((x,), mesh)
    for fn in OTHER_LAYOUTS.values():
        mapped = sf.tree.map(fn, params)
        assert_like(mapped, params)
        named: dict[str, Any] = dict(model.named_parameters())
        want = {name: fn(value) for name, value in named.items()}
        for name, value in sf.gather(mapped).items():
            torch.testing.assert_close(value, want[name])
        torch.testing.assert_close(sf.apply(model, mapped, x), torch.func.functional_call(model, want, (x,)))

        found = sf.grad(lambda p, fn=fn: sf.apply(model, sf.tree.map(fn, p), part).square().mean())(params)
        loss = torch.func.functional_call(model, want, (x,)).square().mean()
        expected = torch.autograd.grad(loss, [*named.values()])
        for name, grad in zip(named, expected, strict=True):
            torch.testing.assert_close(sf.gather(found)[name], grad)


@on_meshes()
def test_a_plain_tensor_is_no_leaf(mesh: DeviceMesh) -> None:
    model, params, x = squares(mesh)
    whole = sf.tree.map(lambda w: 2 * w.full_tensor(), params)
    assert type(whole["0.weight"]) is torch.Tensor
    params["0.weight"] = value = torch.ones(8, 8, dtype=torch.float64)
    for tree in (whole, params):
        with pytest.raises(sf.ShardError, match=r"gather: '0.weight' is a plain tensor, .* or sf.shard\("):
            sf.gather(tree)
        with pytest.raises(sf.ShardError, match=r"apply: '0.weight' is a plain tensor, .* or sf.shard\("):
            sf.apply(model, tree, x)
    params = squares(mesh)[1]
    params = sf.shard(sf.gather(params) | {"0.weight": value}, params.mesh, params.plan)
    assert torch.equal(sf.gather(params)["0.weight"], value)


@pytest.mark.everyday(3)
@on_meshes()
def test_pending_gradients_meet_no_parameters(mesh: DeviceMesh) -> None:
    model, params, x = squares(mesh)
    (part,) = sf.data.local_batch((x,), mesh)
    pending = sf.grad(lambda p: sf.apply(model, p, part).square().mean(), reduce=None)(params)
    if len(x) > len(part):
        for trees in ((params, pending), (pending, params)):
            with pytest.raises(sf.ShardError, match=r"tree.map: '0.weight' is a sum that is still pending .* first"):
                sf.tree.map(torch.add, *trees)
        with pytest.raises(sf.ShardError, match=r"call sf\.reduce_grads first"):
            sf.tree.lerp(params, pending, 0.5)
    twice = sf.reduce_grads(sf.tree.map(torch.add, pending, pending))
    torch.testing.assert_close(sf.gather(twice), sf.gather(sf.tree.map(lambda g: 2 * g, sf.reduce_grads(pending))))


@on_meshes({"tp": 4})
def test_what_computes_along_a_padded_dim_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Linear(8, 6)
    params = sf.shard(model, mesh, sf.Policy(rules={"weight": "o@tp c", "bias": "o@tp"}, pad={"o": 8}))
    with pytest.raises(sf.ShardError, match=r"tree.map: 'weight' is padded, \(6, 8\) to \(8, 8\).* sf.gather\(tree\)"):
        sf.tree.map(lambda w: w.flip(0), params)
    assert torch.equal(
        sf.gather(sf.tree.map(lambda w: w.flip(-1) if w.dim() > 1 else w, params))["weight"], model.weight.flip(-1)
    )
