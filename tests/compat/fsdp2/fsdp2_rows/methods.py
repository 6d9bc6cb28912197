"""Section 4.1. Every method of `FSDPModule`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import untyped
from ranks import quiet
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp2_rows.common import (
    BF16,
    DOORS,
    FP64,
    OURS,
    TORCHS,
    adamw,
    both,
    gradients,
    loss_of,
    meshes,
    mine,
    net,
    refuses,
    row,
    same_error,
    sharded,
    tokens,
    trains,
    values,
)
from shardfn import ShardError
from shardfn.comm.buckets import whole
from shardfn.compat.fsdp2 import FSDPModule, UnshardHandle
from shardfn.testing import assert_close, assert_trees_close, count_collectives


@row("4.1 methods", "unshard")
def unshards() -> None:
    """Whole weights stand in the place of this module's own shards, not of inner groups'; async gives a handle."""
    for door in DOORS:
        model = sharded(door=door)
        assert model.unshard() is None
        assert not isinstance(model.head.weight, DTensor) and isinstance(model.head.weight, nn.Parameter)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        assert_close(model.head.weight.detach(), net().head.weight.detach(), rtol=0, atol=0)
        handle = model.blocks[0].unshard(async_op=True)
        assert isinstance(handle, UnshardHandle) and handle.wait() is None
        assert model.blocks[0].up.weight.shape == (24, 6) and not isinstance(model.blocks[0].up.weight, DTensor)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in net().named_parameters()]
        model.unshard()  # a second time changes nothing
        model.blocks[0].reshard()
        model.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())


@row("4.1 methods", "reshard")
def reshards() -> None:
    """Shards come back, the same objects as before; on sharded modules it does nothing."""
    model = sharded()
    before = list(model.parameters())
    model.reshard()
    model.unshard()
    model.reshard()
    model.reshard()
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
    trains(model)


@row("4.1", "unshard in the computing dtype")
def unshards_in_the_computing_dtype() -> None:
    """Whole weights have the `param_dtype`, shards keep theirs."""
    for door in DOORS:
        model = sharded(door=door, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        model.unshard()
        assert model.head.weight.dtype == BF16
        model.reshard()
        assert model.head.weight.dtype == FP64


@row("4.1", "unshard before a forward")
def unshards_before_a_forward() -> None:
    """As explicit prefetching does it: after the backward parameters are shards again, with their gradients."""
    found = []
    for door in DOORS:
        model = sharded(door=door)
        model.unshard(async_op=True)
        for block in model.blocks:
            block.unshard(async_op=True)
        loss_of(model, mine(tokens())).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters()), door.__name__
        found.append(gradients(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1", "unshard before each forward, and clipping")
def trains_as_torchs_example() -> None:
    """The loop of torch's FSDP2 example: `unshard`, forward, backward, clip by `parameters()`, step."""
    plain = net()
    for each in (plain, *both()):
        optimizer, ids = adamw(each), tokens() if each is plain else mine(tokens())
        for _ in range(3):
            if each is not plain:
                untyped(each).unshard()
            loss_of(each, ids).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        if each is not plain:
            assert_trees_close(values(each), values(plain), rtol=0, atol=1e-9)


def _accumulated(model: Any, parts: int, before: Callable[[Any, bool], None]) -> dict[str, Tensor]:
    """The gradients after several backwards, with something to say before each: is it the last?"""
    for step in range(parts):
        before(model, step == parts - 1)
        loss_of(model, mine(tokens(step))).backward()
    return gradients(model)


def _want(parts: int) -> dict[str, Tensor]:
    plain = net()
    for step in range(parts):
        loss_of(plain, tokens(step)).backward()
    return gradients(plain)


@row("4.1 methods", "set_requires_gradient_sync", ranks=4)
def holds_gradients_back() -> None:
    """Backwards without it add up and do not reduce; the next one with it reduces everything, as in torch."""
    for kind in ("plain", "hybrid"):
        for model in both(kind):
            found = _accumulated(model, 3, lambda each, last: each.set_requires_gradient_sync(last))
            assert_trees_close(found, _want(3), rtol=0, atol=1e-12)
    model = sharded()
    loss_of(model, mine(tokens())).backward()
    model.set_requires_gradient_sync(False)
    with count_collectives() as counted:
        loss_of(model, mine(tokens())).backward()
    assert not counted.as_dict().keys() & {"reduce_scatter", "all_reduce", "all_to_all"}


@row("4.1", "set_requires_gradient_sync: recurse")
def holds_gradients_of_the_root_back() -> None:
    """`recurse=False` is about this module's own group alone; the arguments are by keyword."""
    found = []
    for model in both():
        model.set_requires_gradient_sync(False, recurse=False)
        loss_of(model, mine(tokens())).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, mine(tokens(1))).backward()
        found.append(gradients(model))
        with pytest.raises(TypeError):
            model.set_requires_gradient_sync(True, False)
    assert_trees_close(found[0], _want(2), rtol=0, atol=1e-12)
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)
    model = sharded()
    model.set_requires_gradient_sync(False, recurse=False)
    loss_of(model, mine(tokens())).backward()
    plain = net()
    loss_of(plain, tokens()).backward()
    want = gradients(plain)["blocks.0.up.weight"]
    assert_close(whole(model.blocks[0].up.weight.grad), want, rtol=0, atol=1e-12)


@row("4.1", "set_requires_gradient_sync: an optimizer that steps too early")
def refuses_to_step_with_held_gradients() -> None:
    """An optimizer that steps before gradients are reduced is an error."""
    model = sharded()
    optimizer = adamw(model)
    model.set_requires_gradient_sync(False)
    loss_of(model, mine(tokens())).backward()
    refuses(optimizer.step, ShardError, "only added up")


@row("4.1 methods", "set_requires_all_reduce", ranks=4)
def holds_the_all_reduce_back() -> None:
    """On HSDP, backwards without it leave out the replicas until one has it; in the end as one process."""
    for model in both("hybrid"):
        found = _accumulated(model, 3, lambda each, last: each.set_requires_all_reduce(last))
        assert_trees_close(found, _want(3), rtol=0, atol=1e-12)
    for model in both("plain"):  # nothing to leave out
        found = _accumulated(model, 2, lambda each, last: each.set_requires_all_reduce(last, recurse=True))
        assert_trees_close(found, _want(2), rtol=0, atol=1e-12)


@row("4.1 methods", "set_is_last_backward")
def knows_the_last_backward() -> None:
    """Backwards before the last may be told so; gradients are the same."""
    for model in both():
        found = _accumulated(model, 3, lambda each, last: each.set_is_last_backward(last))
        assert_trees_close(found, _want(3), rtol=0, atol=1e-12)


@row("4.1 methods", "set_reshard_after_backward")
def keeps_weights_after_the_backward() -> None:
    """Weights may be asked to stay after backwards; results are the same, also after a step."""
    for model in both():
        found = _accumulated(model, 3, lambda each, last: each.set_reshard_after_backward(last, recurse=True))
        assert_trees_close(found, _want(3), rtol=0, atol=1e-12)
    model = sharded()
    model.set_reshard_after_backward(False)
    model.set_reshard_after_backward(True)
    trains(model)


def _backward_gathers(model: Any) -> int:
    loss_of(model, mine(tokens())).backward()
    loss = loss_of(model, mine(tokens()))
    with count_collectives() as counted:
        loss.backward()
    model.zero_grad()
    return counted.as_dict().get("all_gather", 0)


@row("4.1 methods", "set_reshard_after_forward")
def changes_what_is_freed() -> None:
    """Between steps, of all groups or of this one; what is no bool is torch's ValueError."""
    for model in both():
        assert _backward_gathers(model) == 2
        model.set_reshard_after_forward(False)
        assert _backward_gathers(model) == 0
        model.blocks[0].set_reshard_after_forward(True)
        assert _backward_gathers(model) == 1
        model.set_reshard_after_forward(False, recurse=False)
        assert _backward_gathers(model) == 1
    trains(sharded(reshard_after_forward=False))
    words = "reshard_after_forward should be a bool, got <class 'int'>"
    same_error(lambda door: sharded(door=door).set_reshard_after_forward(2), ValueError, words)


@row("4.1 methods", "set_modules_to_forward_prefetch")
def prefetches_in_the_forward() -> None:
    """Taken, and trains the same; what is no `FSDPModule` is torch's ValueError."""
    model = sharded()
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_forward_prefetch([])
    trains(model)
    words = "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>: Linear("
    same_error(lambda d: sharded(door=d).set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ValueError, words)


@row("4.1 methods", "set_modules_to_backward_prefetch")
def prefetches_in_the_backward() -> None:
    """Taken, and trains the same; what is no `FSDPModule` is torch's ValueError."""
    model = sharded()
    model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    trains(model)
    words = "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>: Linear("
    same_error(lambda d: sharded(door=d).set_modules_to_backward_prefetch([nn.Linear(2, 2)]), ValueError, words)


@row("4.1 methods", "set_custom_all_gather", "refused")
def refuses_a_gather_of_ones_own() -> None:
    """Gathers are the engine's own; the error names torch's `fully_shard`."""
    refuses(lambda: sharded().set_custom_all_gather(object()), ShardError, "use torch's fully_shard")


@row("4.1 methods", "set_custom_reduce_scatter", "refused")
def refuses_a_reduction_of_ones_own() -> None:
    """Reductions are the engine's own; the error names torch's `fully_shard` and what a plan can do."""
    model = sharded()
    words = ("use torch's fully_shard", "plan.with_reduction")
    refuses(lambda: model.set_custom_reduce_scatter(object()), ShardError, *words)


@row("4.1 methods", "set_all_reduce_hook", "refused", ranks=4)
def refuses_a_hook_on_reductions() -> None:
    """Reductions are the engine's own; the error names hooks on parameters, which see the reduced gradient."""
    model = sharded("hybrid")
    refuses(lambda: model.set_all_reduce_hook(lambda grad: None), ShardError, "register_post_accumulate_grad_hook")
    refuses(lambda: model.set_all_reduce_hook(lambda grad: None, stream=None), ShardError)
    seen: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad}))
    loss_of(model, mine(tokens())).backward()
    plain = net()
    loss_of(plain, tokens()).backward()
    assert_trees_close({n: whole(untyped(g)) for n, g in seen.items()}, gradients(plain), rtol=0, atol=1e-12)


@row("4.1 methods", "set_post_optim_event")
def takes_an_event() -> None:
    """Taken; there is no stream to wait for on a CPU, and gathers wait by themselves elsewhere."""
    model = sharded()
    model.set_post_optim_event(untyped(None))
    trains(model)


def _of_all(model: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of every sharded module, as those without `recurse` want it."""
    for module in model.modules():
        if isinstance(module, (TORCHS.FSDPModule, OURS.FSDPModule)):
            getattr(module, method)(*args, **kwargs)


@row("4.1 methods", "set_gradient_divide_factor", ranks=4)
def divides_gradients_by_a_factor() -> None:
    """Sums of gradients are divided by it instead of by the ranks; of this module's own group alone."""
    for kind in ("plain", "hybrid"):
        found = []
        for model in both(kind):
            _of_all(model, "set_force_sum_reduction_for_comms", True)  # torch cannot without, on gloo
            _of_all(model, "set_gradient_divide_factor", 2.0)
            model.blocks[0].set_gradient_divide_factor(8.0)
            loss_of(model, mine(tokens())).backward()
            found.append(gradients(model))
        assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)
        want = _want(1)
        assert_close(found[1]["head.weight"], want["head.weight"] * 2, rtol=0, atol=1e-12)
        assert_close(found[1]["blocks.0.up.bias"], want["blocks.0.up.bias"] / 2, rtol=0, atol=1e-12)


@row("4.1", "set_gradient_divide_factor: mixed precision and accumulation")
def divides_held_gradients_by_a_factor() -> None:
    """The factor counts also with a `reduce_dtype`, and of gradients that were held back."""
    found = []
    for model in both(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        _of_all(model, "set_force_sum_reduction_for_comms", True)
        _of_all(model, "set_gradient_divide_factor", 1.0)
        found.append(_accumulated(model, 2, lambda each, last: each.set_requires_gradient_sync(last)))
    assert_trees_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert_trees_close(found[1], {n: 2 * g for n, g in _want(2).items()}, rtol=1e-4, atol=1e-5)


@row("4.1 methods", "set_reduce_scatter_divide_factor")
def divides_by_the_old_name() -> None:
    """The old name of `set_gradient_divide_factor`."""
    found = []
    for model in both():
        _of_all(model, "set_force_sum_reduction_for_comms", True)
        with quiet(DeprecationWarning):  # torch's
            _of_all(model, "set_reduce_scatter_divide_factor", 1.0)
        loss_of(model, mine(tokens())).backward()
        found.append(gradients(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1 methods", "set_force_sum_reduction_for_comms")
def sums() -> None:
    """Taken, and trains the same: sums are divided afterwards in any case."""
    for model in both():
        _of_all(model, "set_force_sum_reduction_for_comms", True)
        trains(model)


class _Branches(nn.Module):
    """Both branches compute on all ranks, and each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return [branch(x) for branch in self.branches][dist.get_rank()]


class _TwoInputs(nn.Module):
    """The first layer computes on all ranks, and only the first rank uses it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.image(x)
        return self.text(x + seen if dist.get_rank() == 0 else x)


@row("4.1 methods", "set_reduce_scatter_unused_params")
def reduces_unused_parameters() -> None:
    """Ranks that use different parameters of a group: those that did not use one add zeros to its gradient."""
    found = []
    for door in DOORS:
        model = _Branches().double()
        untyped(door.fully_shard(model)).set_reduce_scatter_unused_params(True)
        model(torch.ones(2, 4, dtype=FP64)).square().sum().backward()
        found.append(gradients(model))
    assert len(found[1]) == 4
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1", "parameters that no rank uses")
def leaves_unused_parameters_alone() -> None:
    """A group that no rank uses gets no gradient, or zeros, as in torch, and the others theirs."""
    found = []
    for door in DOORS:
        model = net()
        untyped(model).more = nn.Linear(2, 2).double()
        door.fully_shard(untyped(model).more, mesh=meshes("plain")[0])
        sharded(door=door, model=model)
        loss_of(model, mine(tokens())).backward()
        found.append(gradients(model))
    assert found[1].keys() == found[0].keys() and "more.weight" not in found[1]
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)


@row("4.1 methods", "set_reduce_scatter_max_input_buffers")
def bounds_buffers() -> None:
    """Taken, and trains the same; what is no positive int is torch's error."""
    model = sharded()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_reduce_scatter_max_input_buffers(1, recurse=False)
    trains(model)
    for wrong, kind, words in (
        (True, TypeError, "max_input_buffers must be an int, got bool"),
        (0, ValueError, "max_input_buffers must be a positive int, got 0"),
    ):
        same_error(lambda d, w=wrong: sharded(door=d).set_reduce_scatter_max_input_buffers(w), kind, words)


@row("4.1 methods", "set_separate_reduce_scatter_group")
def takes_a_group_for_reductions() -> None:
    """Taken, and trains the same."""
    for model in both():
        model.set_separate_reduce_scatter_group()
        trains(model)
        model.set_separate_reduce_scatter_group(False, recurse=False)


@row("4.1 methods", "set_unshard_in_backward")
def leaves_weights_out_of_the_backward() -> None:
    """For weights whose backward does not need them; here nothing is gathered that is not needed."""
    for door in DOORS:
        model = net()
        door.fully_shard(model.emb, mesh=meshes("plain")[0])
        untyped(model.emb).set_unshard_in_backward(False)
        trains(sharded(door=door, model=model))


@row("4.1 methods", "set_allocate_memory_from_process_group_for_comm")
def takes_the_allocator_of_the_group() -> None:
    """Taken, and trains the same."""
    model = sharded()
    _of_all(model, "set_allocate_memory_from_process_group_for_comm", True)
    trains(model)


@row("4.1 methods", "set_symm_mem_for_comm")
def takes_symmetric_memory() -> None:
    """Taken, and trains the same: buffers come from the engine's pool."""
    model = sharded()
    _of_all(model, "set_symm_mem_for_comm")
    _of_all(model, "set_symm_mem_for_comm", backend="NCCL")
    trains(model)


@row("4.1 methods", "_set_unshard_async_op")
def unshards_asynchronously() -> None:
    """Taken, and trains the same."""
    for model in both():
        model._set_unshard_async_op(True)
        trains(model)


@row("4.1 methods", "_get_fsdp_state")
def has_a_state() -> None:
    """An object, one for each group."""
    model = sharded()
    states = [model._get_fsdp_state(), *(block._get_fsdp_state() for block in model.blocks)]
    assert len({id(state) for state in states}) == 3
    assert OURS.fully_shard.state(model) is states[0] and OURS.fully_shard.state(nn.Linear(1, 1)) is None
    pair: list[Any] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    OURS.fully_shard(pair)
    assert pair[0]._get_fsdp_state() is pair[1]._get_fsdp_state()


class _Breaks(nn.Module):
    """Fails in its forward or its backward when told so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fails = inner, ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise RuntimeError("out of memory, say")
        x = self.inner(x)
        if self.fails == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, grad: Tensor) -> None:
        raise RuntimeError("out of memory, say")


@row("4.1 methods", "reset_iter_state")
def starts_again_after_an_exception() -> None:
    """After a forward or backward that failed, the next step is right; held gradients are dropped; root only."""
    for fails in ("forward", "backward"):
        for door in DOORS:
            model: Any = net()
            model.blocks[0] = _Breaks(model.blocks[0])
            sharded(door=door, model=model)
            loss_of(model, mine(tokens())).backward()
            model.zero_grad()
            model.blocks[0].fails = fails
            with pytest.raises(RuntimeError, match="out of memory, say"):
                loss_of(model, mine(tokens())).backward()
            model.blocks[0].fails = ""
            model.reset_iter_state()
            model.zero_grad()
            loss_of(model, mine(tokens())).backward()
            want = {n.replace("blocks.0.", "blocks.0.inner."): g for n, g in _want(1).items()}
            if door is TORCHS and fails == "backward":
                continue  # 2.13's own keeps what had arrived at the head before
            assert_trees_close(gradients(model), want, rtol=0, atol=1e-12)


@row("4.1", "reset_iter_state: drops held gradients")
def drops_held_gradients() -> None:
    """Gradients that were added up and not reduced are lost, as torch says of it (2.13's own keeps them)."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model, mine(tokens(1))).backward()
    model.reset_iter_state()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model, mine(tokens())).backward()
    assert_trees_close(gradients(model), _want(1), rtol=0, atol=1e-12)


@row("4.1", "reset_iter_state: of an inner module")
def resets_the_root_only() -> None:
    """On an inner module it is torch's RuntimeError."""

    def inner(door: Any) -> None:
        model = sharded(door=door)
        model(mine(tokens()))
        model.blocks[0].reset_iter_state()

    same_error(inner, RuntimeError, "reset_iter_state must be called on the root FSDP module")


@row("4.1", "forward through an inner module first")
def refuses_an_inner_forward_first() -> None:
    """The module that runs first is the root: one around it later is torch's RuntimeError."""

    def inner_first(door: Any) -> None:
        model = sharded(door=door)
        model.blocks[0](torch.ones(2, 6, dtype=FP64))
        model(mine(tokens()))

    same_error(inner_first, RuntimeError, "FSDP state has already been lazily initialized for ")
    model = sharded()
    model(mine(tokens()))
    x = torch.ones(2, 6, dtype=FP64)
    assert_close(model.blocks[0](x).detach(), net().blocks[0](x).detach(), rtol=0, atol=1e-12)


@row("4.1", "forward without gradients")
def evaluates() -> None:
    """`no_grad`, `inference_mode` and `eval()` compute the same, and training goes on."""
    model, ids = sharded(), mine(tokens())
    want = net()(ids).detach()
    with torch.no_grad():
        assert_close(model(ids), want, rtol=0, atol=1e-12)
    with torch.inference_mode():
        assert_close(model.eval()(ids).clone(), want, rtol=0, atol=1e-12)
    assert model.training is False
    trains(model.train())


@row("4.1", "forward called several times")
def runs_twice_before_a_backward() -> None:
    """Several forwards before one backward, and several backwards of one graph kept, add up as in torch."""
    found = []
    for model in both():
        (loss_of(model, mine(tokens())) + loss_of(model, mine(tokens(1)))).backward()
        loss = loss_of(model, mine(tokens(2)))
        with quiet():
            loss.backward(retain_graph=True)
        found.append(gradients(model))
    assert_trees_close(found[1], found[0], rtol=0, atol=1e-12)
    assert_trees_close(found[1], _want(3), rtol=0, atol=1e-12)


@row("4.1", "isinstance")
def is_an_instance() -> None:
    """Of `FSDPModule` and of its own class; other modules are not."""
    model = sharded()
    assert isinstance(model, FSDPModule) and not isinstance(model.head, FSDPModule)
    assert [type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)] == ["FSDPNet", "FSDPMLP", "FSDPMLP"]
    assert values(model).keys() == values(net()).keys() and meshes("plain")[0].size() == 2
