"""Section 4.1. Every argument of `fully_shard`."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from drawing import untyped
from models import MLP
from ranks import quiet
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp2_rows.common import (
    BF16,
    DOORS,
    FP32,
    FP64,
    OURS,
    TORCHS,
    Net,
    adamw,
    both,
    gradients,
    loss_of,
    meshes,
    mine,
    net,
    placements,
    refuses,
    row,
    said_by,
    same_error,
    sharded,
    tokens,
    trained,
    trains,
    values,
)
from shardfn import ShardError
from shardfn.compat.fsdp2 import FSDPModule, fully_shard
from shardfn.testing import assert_close, assert_trees_close, count_collectives


@row("4.1", "module")
def shards_in_place() -> None:
    """Returns the same object, with the class FSDP<Orig>; parameters are shards under their names; trains."""
    model = net()
    names = [name for name, _ in model.named_parameters()]
    assert sharded(model=model) is model
    assert type(model).__name__ == "FSDPNet" and isinstance(model, Net) and isinstance(model, FSDPModule)
    assert type(model.blocks[0]).__name__ == "FSDPMLP" and type(model.blocks) is nn.ModuleList
    assert [name for name, _ in model.named_parameters()] == names and model.said == "hello"
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    assert [name for name, _ in model.named_buffers()] == ["shift"] and type(model.shift) is Tensor
    trains(model)


@row("4.1", "signature")
def has_the_signature() -> None:
    """The same arguments, by keyword, with the same defaults as torch's."""
    ours, theirs = (inspect.signature(door.fully_shard).parameters for door in DOORS)
    assert list(ours) == list(theirs)
    assert [(p.kind, p.default) for p in ours.values()] == [(p.kind, p.default) for p in theirs.values()]


@row("4.1", "module: a list")
def shards_a_list_together() -> None:
    """A list of modules is one group and comes back as it is; it may tie weights between them."""
    for door in DOORS:
        model, mesh = net(), meshes("plain")[0]
        for block in model.blocks:
            door.fully_shard(block, mesh=mesh)
        pair = [model.emb, model.head]
        assert door.fully_shard(pair, mesh=mesh) is pair
        door.fully_shard(model, mesh=mesh)
        assert [type(each).__name__ for each in pair] == ["FSDPEmbedding", "FSDPLinear"]
        trains(model)


@row("4.1", "module: containers")
def refuses_containers() -> None:
    """Containers without a forward are torch's ValueError; those that have one are sharded."""

    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
            return x

    words = "fully_shard does not support containers that do not implement forward: "
    same_error(lambda door: door.fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError, words)
    same_error(lambda door: door.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), ValueError, words)
    chain = Chain([nn.Linear(3, 3)])
    want = chain(torch.ones(2, 3)).detach()
    assert isinstance(fully_shard(chain), FSDPModule)
    assert chain(torch.ones(2, 3)).shape == want.shape


@row("4.1", "module: twice")
def refuses_the_same_module_twice() -> None:
    """A module that is sharded already is torch's AssertionError; so is no module at all."""

    def twice(door: Any) -> None:
        model = nn.Linear(2, 2)
        door.fully_shard(model)
        door.fully_shard(model)

    words = "Each distinct composable distributed API can only be applied to a module once."
    same_error(twice, AssertionError, words)
    assert said_by(lambda: fully_shard(untyped(3)))[0] in ("TypeError", "ValueError")


@row("4.1", "module: tied parameters")
def refuses_tied_parameters() -> None:
    """Parameters shared by modules that are sharded apart are torch's ValueError; in one list they train."""

    def tied(door: Any) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        door.fully_shard(model[0])
        door.fully_shard(model)
        return model(torch.ones(2, 4))

    for door in DOORS:
        words = "weight' is shared with a parameter already managed by another FSDP group. For shared/tied parameters"
        refuses(lambda door=door: tied(door), ValueError, "Parameter '", words)
    for door in DOORS:
        plain, model = (_tied() for _ in range(2))
        door.fully_shard([model[0], model[2]])
        door.fully_shard(model)
        x = torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)
        for each in (plain, model):
            each(x).square().mean().backward()
        assert model[0].weight is model[2].weight
        assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


def _tied() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    return model


@row("4.1", "module: tied in one group")
def trains_tied_parameters() -> None:
    """Parameters shared within one group stay shared, and get the sum of both gradients."""
    found = []
    for door in DOORS:
        model = _tied()
        door.fully_shard(model)
        model(torch.linspace(-1, 1, 8, dtype=FP64).view(2, 4)).square().mean().backward()
        assert len(list(model.parameters())) == 3 and model[0].weight is model[2].weight
        found.append(gradients(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1", "module: scalars")
def refuses_scalars() -> None:
    """A scalar parameter is torch's ValueError."""

    def scalar(door: Any) -> None:
        model = nn.Linear(2, 2)
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
        door.fully_shard(model)

    same_error(scalar, ValueError, "fully_shard doesn't support scalar parameters. Change scale to a 1D tensor")


@row("4.1", "module: odd sizes")
def shards_odd_sizes() -> None:
    """Sizes that the ranks do not divide are split as torch splits them: the first ranks have more."""
    found = []
    for door in DOORS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        door.fully_shard(model)
        found.append({name: p.to_local().detach() for name, p in untyped(model).named_parameters()})
    assert_trees_close(found[1], found[0], rtol=0, atol=0)
    assert found[0]["0.weight"].shape[0] == 3 - dist.get_rank()


@row("4.1", "module: frozen parameters")
def trains_around_frozen_parameters() -> None:
    """Frozen parameters are sharded, get no gradient, and may stand beside others in one group."""
    model, plain = untyped(net()), untyped(net())
    for each in (model, plain):
        each.blocks[0].up.requires_grad_(False)
        each.emb.requires_grad_(False)
    trains(sharded(model=model), plain=plain)
    assert isinstance(model.emb.weight, DTensor) and model.emb.weight.grad is None
    assert model.blocks[0].up.weight.requires_grad is False and model.blocks[0].up.weight.grad is None


@row("4.1", "module: on the meta device")
def shards_meta_modules() -> None:
    """A model on the meta device is sharded there; `to_empty` and `reset_parameters` make it real."""
    with torch.device("meta"):
        model: Any = Net().double()
    sharded(model=model)
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in model.parameters())
    full = dict(net().named_parameters())
    with torch.no_grad():
        model.shift.copy_(net().shift)
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(full[name].detach(), p.device_mesh, p.placements))
    trains(model)


@row("4.1", "mesh: None")
def takes_all_ranks() -> None:
    """Without a mesh all ranks shard."""
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    weight = untyped(model.head.weight)
    assert weight.placements == (Shard(0),) and weight.device_mesh.size() == 2
    trains(model)


@row("4.1", "mesh: 1-D", ranks=4)
def shards_over_one_axis() -> None:
    """One axis gives `(Shard(0),)`, whatever its name; part of the ranks will do."""
    for names in (None, ("dp",), ("fsdp",), ("x",)):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=names)
        model = sharded(mesh=mesh)
        assert set(placements(model).values()) == {(Shard(0),)}
        assert model.head.weight.device_mesh.size() == 4
        trains(model, steps=1)
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))["dp"]
    model = sharded(mesh=half)
    assert model.head.weight.to_local().shape[0] == 8 - dist.get_rank() % 2
    ids = tokens().chunk(2)[dist.get_rank() % 2]
    loss_of(model, ids).backward()
    plain = net()
    loss_of(plain, tokens()).backward()
    assert_trees_close(gradients(model), gradients(plain), rtol=0, atol=1e-12)


@row("4.1", "mesh: 2-D", ranks=4)
def shards_over_two_axes() -> None:
    """Two axes replicate and shard: `(Replicate(), Shard(0))`, whatever their names."""
    for names in (("replicate", "shard"), ("dp_replicate", "dp_shard"), ("x", "y"), ("dp", "fsdp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        torchs = sharded("hybrid", TORCHS, mesh=mesh)
        model = sharded("hybrid", mesh=mesh)
        assert placements(model) == placements(torchs)
        assert set(placements(model).values()) == {(Replicate(), Shard(0))}
        trains(model, steps=1)


@row("4.1", "mesh: errors", ranks=4)
def refuses_other_meshes() -> None:
    """Three axes, and two without names, are torch's errors."""
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    unnamed = init_device_mesh("cpu", (2, 2))
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), mesh=three), ValueError, "fully_shard expects a 1D or 2D")
    words = "Please init the 2D mesh for HSDP with mesh_dim_names specified"
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), mesh=unnamed), AssertionError, words)
    refuses(lambda: fully_shard(nn.Linear(2, 2), mesh=untyped("cpu")), TypeError, "expected a DeviceMesh, got str")


@row("4.1", "mesh: after parallelize_module", ranks=4)
def shards_beside_tensor_parallelism() -> None:
    """Parameters that `parallelize_module` split are split over the data ranks too, and train."""
    model = sharded("tensor")
    up, head = model.blocks[0].up.weight, model.head.weight
    assert up.device_mesh.mesh_dim_names == ("tp", "dp") and up.placements == (Shard(0), Shard(0))
    assert up.to_local().shape == (6, 6) and head.to_local().shape[0] in (7, 8)
    assert_close(up.full_tensor().detach(), net().blocks[0].get_parameter("up.weight").detach(), rtol=0, atol=0)
    trains(model, "tensor")


@row("4.1", "mesh: several in one tree", "refused", ranks=4)
def refuses_other_meshes_inside() -> None:
    """Modules of one tree over meshes of other shapes, which torch takes, are an error that says to use one."""

    def mixed(door: Any) -> None:
        model = net()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        door.fully_shard(model.blocks[0], mesh=mesh)
        for each in (model.blocks[1], model):
            door.fully_shard(each, mesh=meshes("plain")[0])
        trains(model, steps=1)

    mixed(TORCHS)
    refuses(lambda: mixed(OURS), ShardError, "'blocks.0' was sharded over another mesh", "use the same one")


def _gathers(model: Any) -> tuple[int, int]:
    """How many gathers a forward takes, and its backward, once the first steps are over."""
    for _ in range(2):
        loss_of(model, mine(tokens())).backward()
    with count_collectives() as forward:
        loss = loss_of(model, mine(tokens()))
    with count_collectives() as backward:
        loss.backward()
    model.zero_grad()
    return forward.as_dict().get("all_gather", 0), backward.as_dict().get("all_gather", 0)


@row("4.1", "mesh: given to some")
def takes_meshes_of_other_names() -> None:
    """Inner modules without a mesh, and the root with one of the same ranks, train in torch."""
    for door in DOORS:
        model = net()
        door.fully_shard(model.blocks[0])
        door.fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))
        door.fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        trains(model)


@row("4.1", "reshard_after_forward: a bool")
def frees_or_keeps() -> None:
    """True gathers groups again for the backward, also the root; False does not."""
    for inner, root, again in ((True, False, 2), (False, False, 0), (True, True, 3), (False, True, 1)):
        model = net()
        for door in DOORS:
            model = net()
            for block in model.blocks:
                door.fully_shard(block, reshard_after_forward=inner)
            door.fully_shard(model, reshard_after_forward=root)
            assert _gathers(model) == (3, again), (door.__name__, inner, root)
        trains(model)


@row("4.1", "reshard_after_forward: None")
def keeps_the_root() -> None:
    """None is True for inner groups and False for the root."""
    torchs, model = both()
    assert _gathers(torchs) == (3, 2)
    assert _gathers(model) == (3, 2)


@row("4.1", "reshard_after_forward: a number", ranks=4)
def keeps_a_part() -> None:
    """A factor of the ranks keeps that part; 1 is False and all ranks True; anything else torch's ValueError."""
    for number in (2, 4):
        model = sharded(reshard_after_forward=number)
        assert set(placements(model).values()) == {(Shard(0),)}
        trains(model)
    with quiet():
        model = sharded(reshard_after_forward=1)
    assert _gathers(model) == (3, 0)
    words = "If passing reshard_after_forward as an int, it should be a factor of 4, not "
    for number in (0, 3, 8):
        same_error(lambda d, n=number: d.fully_shard(nn.Linear(2, 2), reshard_after_forward=n), ValueError, words)
    words = "reshard_after_forward should be a bool or an int"
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), reshard_after_forward=0.5), ValueError, words)


@row("4.1", "reshard_after_forward: a number on a 2-D mesh", ranks=4)
def keeps_a_part_of_replicas() -> None:
    """On two axes a number is a factor of the axis that shards."""
    trains(sharded("hybrid", reshard_after_forward=2), "hybrid")
    data, _ = meshes("hybrid")
    words = "If passing reshard_after_forward as an int, it should be a factor of 2, not 4"
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), mesh=data, reshard_after_forward=4), ValueError, words)


def _last(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() == 2 else None


def _negative(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.dim() == 2 else None


@row("4.1", "shard_placement_fn")
def splits_another_dim() -> None:
    """`Shard(d)` splits dim d, also from the end, and None dim 0; as torch, to the element."""
    for fn in (_last, _negative):
        torchs, model = both(shard_placement_fn=fn)
        assert placements(model) == placements(torchs)
        assert model.blocks[0].up.weight.placements == (Shard(1),)
        local = [{n: p.to_local().detach() for n, p in each.named_parameters()} for each in (torchs, model)]
        assert_trees_close(local[1], local[0], rtol=0, atol=0)
        trains(model)


@row("4.1", "shard_placement_fn: other meshes", ranks=4)
def splits_another_dim_on_other_meshes() -> None:
    """On HSDP and beside tensor parallelism too."""
    model = sharded("hybrid", shard_placement_fn=_last)
    assert model.blocks[0].up.weight.placements == (Replicate(), Shard(1))
    trains(model, "hybrid")
    model = sharded("tensor", shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    assert model.blocks[0].up.weight.placements == (Shard(0), Shard(1))
    trains(model, "tensor")


@row("4.1", "shard_placement_fn: errors")
def refuses_bad_placements() -> None:
    """Uneven splits of other dims and what is no `Shard` are errors, as in torch."""
    words = "FSDP does not support uneven sharding on dim 1: "
    same_error(lambda d: d.fully_shard(nn.Linear(5, 4), shard_placement_fn=_last), NotImplementedError, words)
    for wrong in (Replicate(), Partial(), 1):
        calls = [lambda d=d, w=wrong: d.fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: w) for d in DOORS]
        assert all(said_by(call)[0] != "nothing" for call in calls)
        refuses(calls[1], ValueError, "shard_placement_fn returned", "not Shard or None")
    refuses(lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(2)), ValueError, "has no dim 2")


@row("4.1", "shard_placement_fn: ShardPlacementResult", "refused", ranks=4)
def refuses_meshes_of_parameters() -> None:
    """A mesh of a parameter's own is refused: shard its module over that mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    info = FSDPMeshInfo(meshes("plain")[0], shard_mesh_dim=0)
    wanted = ShardPlacementResult(Shard(0), info)
    fn = untyped(lambda parameter: wanted)
    refuses(
        lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=fn),
        ShardError,
        "a mesh of its own",
        "shard its module over that mesh",
    )


def _like_torch(policy: MixedPrecisionPolicy, dtype: torch.dtype = FP32, kind: str = "plain") -> tuple[Any, Any]:
    """Train both under a policy and require the same outputs, gradients and values."""
    torchs, ours = both(kind, dtype, mp_policy=policy)
    outputs = [model(mine(tokens(), kind)) for model in (torchs, ours)]
    assert outputs[0].dtype == outputs[1].dtype
    assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
    for output in outputs:
        output.float().square().mean().backward()
    grads = [gradients(model) for model in (torchs, ours)]
    assert {n: g.dtype for n, g in grads[0].items()} == {n: g.dtype for n, g in grads[1].items()}
    assert_trees_close(grads[1], grads[0], rtol=2e-2, atol=1e-3)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    return torchs, ours


@row("4.1", "mp_policy: param_dtype")
def computes_in_another_dtype() -> None:
    """Weights compute in it, outputs and gradients are as torch's; shards keep their own dtype."""
    _, ours = _like_torch(MixedPrecisionPolicy(param_dtype=BF16))
    assert ours(mine(tokens())).dtype == BF16
    assert {p.grad.dtype for p in ours.parameters()} == {FP32}
    ours.unshard()
    assert ours.head.weight.dtype == BF16
    ours.reshard()
    assert MixedPrecisionPolicy() == OURS.MixedPrecisionPolicy() and OURS.MixedPrecisionPolicy is MixedPrecisionPolicy


@row("4.1", "mp_policy: reduce_dtype", ranks=4)
def reduces_in_another_dtype() -> None:
    """Gradients are reduced in it, with or without a `param_dtype`; on HSDP too."""
    for kind in ("plain", "hybrid"):
        for policy in (MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(reduce_dtype=BF16)):
            _like_torch(policy, kind=kind)
    model = sharded(model=net(FP32), mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    loss_of(model, mine(tokens())).backward()
    exact = model.head.weight.grad.full_tensor()
    assert not torch.equal(exact, gradients(_reduced_exactly())["head.weight"])


def _reduced_exactly() -> Any:
    model = sharded(model=net(FP32))
    loss_of(model, mine(tokens())).backward()
    return model


@row("4.1", "mp_policy: output_dtype")
def casts_outputs() -> None:
    """Floating outputs of each group are cast to it."""
    outputs = []
    for door in DOORS:
        model, mesh = net(FP32), meshes("plain")[0]
        for block in model.blocks:
            door.fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, FP32))
        door.fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
        outputs.append(model(mine(tokens())))
        assert outputs[-1].dtype == FP32
    assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    for door in DOORS:
        model = net(FP32)
        door.fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
        assert_close(model(mine(tokens())), net(FP32)(mine(tokens())).bfloat16().detach(), rtol=1e-2, atol=1e-2)


class _Sees(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype)) + (1000 if input.dtype == FP32 else 0)


@row("4.1", "mp_policy: cast_forward_inputs")
def casts_inputs() -> None:
    """Floating inputs become the compute dtype, or stay as they are under False; integers stay."""
    for casts in (True, False):
        found = []
        for door in DOORS:
            torch.manual_seed(0)
            model = nn.Sequential(_Sees(4, 4))
            policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=casts)
            door.fully_shard(model[0], mp_policy=policy)
            door.fully_shard(model, mp_policy=policy)
            found.append(model(torch.ones(2, 4)).float())
        assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)
        assert bool((found[1] > 500).all()) == (not casts)


@row("4.1", "mp_policy: of inner groups")
def mixes_policies() -> None:
    """Each group has its own policy."""
    found = []
    for door in DOORS:
        model, mesh = net(FP32), meshes("plain")[0]
        door.fully_shard(model.blocks[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
        door.fully_shard(model.blocks[1], mesh=mesh)
        door.fully_shard(model, mesh=mesh)
        out = model(mine(tokens()))
        assert out.dtype == FP32
        out.square().mean().backward()
        found.append((out.detach(), gradients(model)))
    assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    assert_trees_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0][0], net(FP32)(mine(tokens())).detach())


@row("4.1", "offload_policy")
def offloads() -> None:
    """`CPUOffloadPolicy`, with or without pinned memory, keeps shards and gradients on the host."""
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy()):
        model = sharded(offload_policy=policy)
        trains(model)
        assert all(p.device.type == "cpu" and p.grad.device.type == "cpu" for p in model.parameters())
    assert OURS.CPUOffloadPolicy is CPUOffloadPolicy and OURS.OffloadPolicy is OffloadPolicy


@row("4.1", "ignored_params")
def ignores_parameters() -> None:
    """They stay plain, are not moved, and their gradients are this rank's own, as in torch."""
    found = []
    for door in DOORS:
        model = net()
        mesh, ignored = meshes("plain")[0], {model.head.weight, model.blocks[0].get_parameter("up.bias")}
        for block in model.blocks:
            door.fully_shard(block, mesh=mesh, ignored_params=ignored)
        door.fully_shard(model, mesh=mesh, ignored_params=ignored)
        assert {n for n, p in model.named_parameters() if not isinstance(p, DTensor)} == {
            "head.weight",
            "blocks.0.up.bias",
        }
        assert model.head.weight in ignored
        loss_of(model, mine(tokens())).backward()
        found.append(gradients(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)
    own: list[Any] = [torch.zeros_like(found[1]["head.weight"]) for _ in range(2)]
    dist.all_gather(own, found[1]["head.weight"])
    assert not torch.equal(own[0], own[1])


def _on_whole_mesh(mesh: Any) -> Net:
    """The blocks split over `tp`, everything on the whole mesh, as `dp_mesh_dims` wants it."""
    model = net()
    for name, parameter in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        where = [
            Shard(0) if axis == "tp" and key == "weight" and "up" in owner else Replicate() for axis in _names(mesh)
        ]
        made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, where))
        setattr(model.get_submodule(owner), key, made)
    model.shift = distribute_tensor(untyped(model.shift), mesh, [Replicate()] * mesh.ndim)
    return model


def _names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names)


def _inputs(ids: Tensor, mesh: Any, data: tuple[str, ...]) -> DTensor:
    """A batch that the data dims split."""
    return distribute_tensor(ids, mesh, [Shard(0) if axis in data else Replicate() for axis in _names(mesh)])


@row("4.1", "dp_mesh_dims: parameters on the whole mesh", ranks=4)
def takes_parameters_on_the_whole_mesh() -> None:
    """DTensors on all of it, whole over the data dims; modules and inputs are such DTensors too, as in torch."""
    for names, dims in (
        (("fsdp", "tp"), DataParallelMeshDims(shard="fsdp")),
        (("tp", "dp"), DataParallelMeshDims(shard="dp")),
        (("out", "in"), DataParallelMeshDims(shard="in", replicate="out")),
    ):
        found = []
        for door in DOORS:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            model = _on_whole_mesh(mesh)
            for block in model.blocks:
                door.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
            door.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
            optimizer = adamw(model)
            for step in range(2):
                optimizer.zero_grad()
                out = model(_inputs(tokens(step), mesh, (*dims.replicate_names, *dims.shard_names)))
                out.square().mean().full_tensor().backward()
                optimizer.step()
            found.append((gradients(model), values(model)))
        assert_trees_close(found[1], found[0], rtol=0, atol=1e-10)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    wrong = nn.Linear(4, 4, bias=False)
    wrong.weight = nn.Parameter(distribute_tensor(wrong.weight.detach(), mesh, [Shard(0)]))
    words, dims = "Expected Replicate() on DP shard dim 'dp' (index 0) but got S", DataParallelMeshDims(shard="dp")
    same_error(lambda door: door.fully_shard(wrong, mesh=mesh, dp_mesh_dims=dims), ValueError, words)


@row("4.1", "dp_mesh_dims: plain parameters", ranks=4)
def names_the_data_dims() -> None:
    """Names the dims of a larger mesh that split the batch: one, several flattened, or replicate and shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("replicate", "shard")))
    assert model.head.weight.to_local().shape[0] in (3, 4)
    trains(model, steps=1)
    model = sharded(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"))
    assert model.head.weight.placements == (Replicate(), Shard(0))
    trains(model, steps=1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model.head.weight.to_local().shape[0] == 8 - dist.get_rank() // 2
    trains(model, "tensor", steps=1)


@row("4.1", "dp_mesh_dims: what is refused", "refused", ranks=4)
def refuses_other_data_dims() -> None:
    """Only replicating is refused in favour of DDP; names that are not there are torch's ValueError."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    only = DataParallelMeshDims(replicate="a")
    refuses(lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=only), ShardError, "DDP")
    swapped = DataParallelMeshDims(shard="a", replicate="b")
    words = "replicate before shard"
    refuses(lambda: fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=swapped), ShardError, words)
    wrong = DataParallelMeshDims(shard="c")
    words = "Mesh dim name 'c' not found in mesh.mesh_dim_names ('a', 'b')"
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=wrong), ValueError, words)
    unnamed = init_device_mesh("cpu", (4,))
    words = "mesh must have mesh_dim_names when dp_mesh_dims is provided"
    same_error(lambda d: d.fully_shard(nn.Linear(2, 2), mesh=unnamed, dp_mesh_dims=wrong), ValueError, words)


@row("4.1", "optimizers made before sharding")
def refuses_old_optimizers() -> None:
    """An optimizer of the parameters that shards replaced is an error at its step."""
    model = net()
    optimizer = adamw(model)
    sharded(model=model)
    loss_of(model, mine(tokens())).backward()
    refuses(optimizer.step, ShardError, "the optimizer was made before the model was sharded")


@row("4.1", "only the root")
def shards_only_the_root() -> None:
    """One group of everything trains too."""
    model = net()
    fully_shard(model, mesh=meshes("plain")[0])
    assert not isinstance(model.blocks[0], FSDPModule) and isinstance(model.blocks[0], MLP)
    trains(model)
    assert _gathers(model)[0] == 1


@row("4.1", "trains as torch's", ranks=4)
def trains_as_torchs() -> None:
    """Three steps give the values that torch's own give, on every mesh."""
    for kind in ("plain", "hybrid"):
        torchs, ours = both(kind)
        for model in (torchs, ours):
            trained(model, kind, steps=3)
        assert_trees_close(values(ours), values(torchs), rtol=0, atol=1e-10)
