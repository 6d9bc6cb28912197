"""`shard`, `gather`, `reduce_grads`, `reshard`: the laws as properties, the collectives counted, bad input on every rank."""

import torch
from drawing import FLOATS, INTS, Case, assert_same_bits, assert_same_tree, cases, hold_for_all
from torch import Tensor, nn

import shardfn as sf
from shardfn._torch import unwrap_local, wrap_local
from shardfn.core.buckets import leaf_spec
from shardfn.core.layout import compute_view, local_slice, to_leaves
from shardfn.core.mesh import Grid, grid

# Laws


def gather_undoes_shard(case: Case) -> None:
    model, layouts = case.model(), case.layouts[0]
    full = sf.gather(sf.shard(model, layouts.mesh(), layouts.policy()))
    want = dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else model
    assert set(full) == set(want)
    for name, tensor in want.items():
        assert_same_bits(full[name], tensor, name)


def test_gather_undoes_shard() -> None:
    hold_for_all(gather_undoes_shard, cases())


def reshard_equals_shard(case: Case) -> None:
    model, (first, second, third) = case.model(), case.layouts
    params = sf.shard(model, first.mesh(), first.policy())
    there = sf.reshard(params, second.policy(), second.mesh())
    assert_same_tree(there, sf.shard(model, second.mesh(), second.policy()))
    assert_same_tree(sf.reshard(there, third.policy(), third.mesh()), sf.shard(model, third.mesh(), third.policy()))


def test_reshard_equals_shard() -> None:
    hold_for_all(reshard_equals_shard, cases(layouts=3))


def pending_on_a_rank(case: Case, params: sf.Params, places: Grid, typed: bool) -> dict[str, Tensor]:
    """What the backward leaves on this rank: its own numbers, the same along compute axes, with junk in the padding."""
    plan = params.plan
    full = case.whole_numbers(data_index(plan, places))
    out: dict[str, Tensor] = {}
    for layout in plan.layouts.values():
        wholes = []
        for leaf, whole in zip(layout.leaves, to_leaves(layout, full[layout.name]), strict=True):
            inside = to_leaves(layout, torch.ones_like(full[layout.name]))[layout.leaves.index(leaf)]
            junk = torch.where(inside == 0, torch.full_like(whole, 3), whole)
            wholes.append(local_slice(leaf, junk, places.sizes, places.coords, plan.roles.compute))
        if typed:
            specs = [leaf_spec(plan, places, leaf.name, pending=True) for leaf in layout.leaves]
            out |= {leaf.name: wrap_local(x, spec) for leaf, x, spec in zip(layout.leaves, wholes, specs, strict=True)}
        else:
            out[layout.name] = compute_view(layout, wholes, plan.roles.data)
    return out


def data_index(plan: sf.Plan, places: Grid) -> int:
    index = 0
    for axis in plan.roles.data:
        index = index * places.sizes[axis] + places.coords[axis]
    return index


def reduced_full(case: Case, plan: sf.Plan, op: str) -> dict[str, Tensor]:
    ranks = 1
    for axis in plan.roles.data:
        ranks *= plan.axes[axis]
    each = [case.whole_numbers(index) for index in range(ranks)]
    total = {name: torch.stack([numbers[name] for numbers in each]).sum(0).to(each[0][name].dtype) for name in each[0]}
    return {name: x / ranks if op == "mean" else x for name, x in total.items()}


def reduce_grads_adds_once(case: Case) -> None:
    layouts = case.layouts[0]
    params = sf.shard(case.whole_numbers(99), layouts.mesh(), layouts.policy())
    places = grid(params.mesh, params.plan.roles.storage)
    exact = all(dtype in FLOATS for dtype in case.dtypes)
    for op in ("mean", "sum") if exact else ("sum",):
        want = sf.shard(reduced_full(case, params.plan, op), layouts.mesh(), layouts.policy())
        for typed in (False, True):
            pending = pending_on_a_rank(case, params, places, typed)
            grads = sf.reduce_grads(params.like(pending) if typed else pending, op=op, like=None if typed else params)
            assert_same_tree(grads, want)
            again = sf.reduce_grads(grads, op=op)
            assert all(again[name] is leaf for name, leaf in grads.items()) and list(again) == list(grads)


def test_reduce_grads_adds_once() -> None:
    hold_for_all(reduce_grads_adds_once, cases(dtypes=(*FLOATS, *INTS)))


def gather_is_differentiable(case: Case) -> None:
    layouts = case.layouts[0]
    params = sf.shard(case.whole_numbers(99), layouts.mesh(), layouts.policy())
    places = grid(params.mesh, params.plan.roles.storage)
    leaves = {n: wrap_local(unwrap_local(x), leaf_spec(params.plan, places, n), requires_grad=True) for n, x in params.items()}
    full = sf.gather(params.like(leaves))
    weights = case.whole_numbers(data_index(params.plan, places))
    loss = sum((weights[name] * full[name]).double().sum() for name in full)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    want = sf.shard(reduced_full(case, params.plan, "mean"), layouts.mesh(), layouts.policy())
    assert_same_tree(grads, want)


def test_gather_is_differentiable() -> None:
    hold_for_all(gather_is_differentiable, cases(dtypes=FLOATS))
