"""Shards that a module holds: its parameters are the leaves of a tree.

`Trainer` and the compatible classes keep no tree. The parameters of their module are `nn.Parameter(DTensor)`s, so that
optimizers, `state_dict` and torch.distributed.checkpoint find them; `ModuleShards` knows where each leaf is, and makes
the tree that functions take.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardfn import _torch
from shardfn._torch import buffers_of, children_of, dtypes_of, parameters_of, refresh_flat_weights, unwrap_local
from shardfn.binding import with_tables
from shardfn.comm import buckets
from shardfn.layout import CLASS, OWN, Grid, Plan, Policy, Reduction, grid_of, note_shard, submodule, unwrapped
from shardfn.notation import ShardError, raise_problems
from shardfn.params import Params, initialize, state_dicts
from shardfn.stateful.torch_optimizers import REPLACED, SHARD, SUCCESSOR, watch_optimizers
from shardfn.transforms import apply

STANDS_FOR = f"{OWN}stands_for"  # on a whole parameter: the leaf that it stands for


_AROUND: Any = WeakIdKeyDictionary()  # part of a leaf -> the storage of the leaf; of leaves no weak reference may be
# All that were made for one module: only those with the layouts of the last one know what its parameters are.
_MADE_FOR: "weakref.WeakKeyDictionary[nn.Module, WeakSet[ModuleShards]]" = weakref.WeakKeyDictionary()


class ModuleShards:
    """The plan of the shards that a module holds, and where each leaf is."""

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        """The parameters of `model` must be the leaves of `plan` already: see `install` and `adopt`."""
        self.plan, self.mesh = plan, mesh
        self._sharded_anew = False
        self._storages = list[int]()  # of the leaves, when they were last used
        self._tables = [with_tables(module) for module in model.modules()]
        self._counts = list(map(len, self._tables))
        slots = [(leaf, (parameters_of(x), key)) for x, _, _, keys in _owned(model, plan) for leaf, key in keys.items()]
        # The table of a module, and the key in it; a tied one has several.
        first: dict[str, tuple[dict[str, Any], str]] = dict(reversed(slots))
        self._slots = {name: first[name] for name in plan.leaves}
        self._of_modules: Mapping[str, Tensor] | None = None  # the buffers of a tree that are those of the modules
        self._children = [children_of(module) for module in model.modules()]
        self._structure = self._structure_now()
        self._dtypes = dtypes_of(self._not_replaced().values())
        named = model.named_modules(remove_duplicate=False)
        # The names of a module in a tree begin with its path, "block.".
        self._buffers = [(f"{path}." if path else "", buffers_of(module)) for path, module in named]
        self._model = weakref.ref(unwrapped(model))
        self._layouts = mesh, [(layout.leaves, layout.shared, layout.kept) for layout in plan.layouts.values()]
        for earlier in _MADE_FOR.setdefault(unwrapped(model), WeakSet()):
            earlier._sharded_anew = earlier._layouts != self._layouts
        _MADE_FOR[unwrapped(model)].add(self)

    def leaves(self) -> dict[str, Any]:
        """Stored name -> the parameter that is its leaf, also while a whole one stands in its place."""
        if self._sharded_anew:
            why = "this model was sharded again since, in another way, and its parameters are shards of that"
            raise ShardError(f"{why}. Use what sharded it last, or shard copies: Trainer(copy.deepcopy(model), ...)")
        try:
            leaves = {name: dict.__getitem__(table, key) for name, (table, key) in self._slots.items()}
        except KeyError as missing:
            raise _added(f"the parameter {missing} was taken away") from None
        if nn.Parameter in set(map(type, leaves.values())):  # leaves are DTensors
            return {name: vars(leaf).get(STANDS_FOR, leaf) for name, leaf in leaves.items()}
        return leaves

    def params(self, reduction: Reduction | None = "mean", holds_back: Callable[[str], bool] | None = None) -> Params:
        """The tree, with the module's buffers.

        `reduction` is what a backward does with its gradients, and `holds_back` says of a unit, when its gradients
        come, whether they stay unreduced.
        """
        params = Params(self._not_replaced(), self.plan.with_reduction(reduction), self.mesh, self.buffers_now())
        params.holds_back = holds_back
        return params

    def _not_replaced(self) -> dict[str, Any]:
        """The leaves, if nobody has assigned to `.data` of one, which is around its part, and does not replace it."""
        leaves = self.leaves()
        now = [*map(_torch.storage_key, leaves.values())]
        if now != self._storages:
            parts = _torch.unwrap_locals([*leaves.values()])
            for name, part, around in zip(leaves, parts, now, strict=True):
                if _AROUND.setdefault(part, around) != around:
                    raise ShardError(f"'{name}'.data = value does not change a DTensor: write parameter.copy_(value)")
            self._storages = now
        return leaves

    def run(self, model: nn.Module, params: Params | None, method: str, args: Any, kwargs: Any) -> Any:
        """Call a method of the module with the weights of a tree that `params` made.

        Without a tree the whole parameters in the places of the shards count, and nobody trains them.
        """
        if params is None and not self.plan.placed_axes:
            return bound(model, method)(*args, **kwargs)
        if params is None:  # modules want DTensors
            params = self._params_of_whole(model)
        self.lend(params)
        self._of_modules = params.buffers
        return apply(model, params, *args, method=method, **kwargs)

    def lend(self, params: Params) -> None:
        """Have calls with a tree that `params` made compute with the buffers of the module itself.

        Raises:
            ShardError: it has other parameters than when it was sharded.
        """
        if list(map(len, self._tables)) != self._counts:
            raise _added("a parameter was added to a module, or taken away")
        params.in_place = self

    def is_of(self, model: nn.Module) -> bool:
        """Whether it holds the shards of that very model."""
        return self._model() is unwrapped(model)

    def begin(self, model: nn.Module, params: Params) -> None:
        """A call begins, with the buffers of a tree."""
        if params.buffers is not self._of_modules:
            self.keep_buffers(model, params.buffers)

    def end(self, model: nn.Module, params: Params) -> None:
        """It is over.

        Raises:
            ShardError: the forward has added parameters.
        """
        if params.buffers is not self._of_modules:
            params.buffers.update(self.buffers_now())
        for name, p in () if self._has_structure else model.named_parameters():
            if not isinstance(p, DTensor) and name not in self.plan.info.ignored:
                raise _added(f"'{name}' was added by a forward")

    def buffers_now(self) -> dict[str, Tensor]:
        """By name, the buffers that the modules have."""
        return {path + key: x for path, table in self._buffers if table for key, x in table.items() if x is not None}

    def _params_of_whole(self, model: nn.Module) -> Params:
        """The tree of the values that whole parameters in the places of the shards have now."""
        tree = self.params()
        now = dict(model.named_parameters(remove_duplicate=False))
        params = state_dicts.from_state_dict(tree, {name: now[name].detach() for name in self.plan.canonical})
        params.buffers = tree.buffers
        return params

    def keep_buffers(self, model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        """What a forward assigned to buffers stays: the tree that it ran with is gone after the call."""
        now = self.buffers_now()
        for name, value in buffers.items():
            if now.get(name) is not value:
                owner, _, key = name.rpartition(".")
                buffers_of(submodule(model, owner))[key] = value

    @property
    def fits(self) -> bool:
        """Whether the module has the structure that the plan was made for."""
        return self._has_structure and self._dtypes == dtypes_of(self.leaves().values())

    @property
    def _has_structure(self) -> bool:
        now = self._structure_now()
        return len(now) == len(self._structure) and all(map(is_, now, self._structure))

    def _structure_now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._children)))

    @torch.no_grad()
    def copy_in(self, tree: Mapping[str, Tensor]) -> None:
        """Give the leaves the values of others with the same layouts."""
        mine = self.leaves()
        for name, leaf in tree.items():
            unwrap_local(mine[name]).copy_(unwrap_local(leaf))


def bound(module: nn.Module, method: str) -> Any:
    """A method of the model itself: a class that shards in place has another `__call__`."""
    module = unwrapped(module)
    swapped = module.__dict__.get(CLASS) if method not in module.__dict__ else None
    return getattr(module, method) if swapped is None else getattr(swapped, method).__get__(module)


def _added(what: str) -> ShardError:
    why = f"{what} after the model was sharded: nobody would reduce its gradient. Change parameters"
    return ShardError(f"{why} before the model is wrapped, or shard what you add as a module of its own")


def _owned(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, str, str, dict[str, str]]]:
    """(module, attribute, parameter, leaf -> its attribute) of every place where a module holds a parameter."""
    for info in plan.info.modules:
        module = submodule(model, info.name)
        for attribute, name in info.params:
            leaves = (leaf.name for leaf in plan.layouts[name].leaves)
            yield module, attribute, name, {leaf: attribute + leaf.removeprefix(name) for leaf in leaves}


def install(model: nn.Module, params: Params) -> ModuleShards:
    """Put the shards of a tree into its model as its parameters, with the attributes of the old ones.

    An optimizer that still has the old ones is refused when it steps.
    """
    watch_optimizers()
    new_params: dict[str, nn.Parameter] = {}
    done: set[tuple[int, str]] = set()  # several objects may stand before one module, and share its tables
    for module, attribute, name, leaves in _owned(model, params.plan):
        table, layout = parameters_of(module), params.plan.layouts[name]
        if (id(table), attribute) in done:
            continue
        done.add((id(table), attribute))
        before = table[attribute]
        assert before is not None
        for leaf, key in leaves.items():
            if leaf not in new_params:
                new_params[leaf] = nn.Parameter(params[leaf], layout.trainable)
                vars(new_params[leaf]).update(vars(before), **{SHARD: (leaf, before.dim())})
            vars(before).update({REPLACED: name, SUCCESSOR: new_params[leaf]})
            note_shard(module, key, layout.placed)
        items, shards = list(table.items()), {key: new_params[leaf] for leaf, key in leaves.items()}
        table.clear()
        for key, value in items:  # in the same position: optimizers number parameters by it
            table.update(shards if key == attribute else {key: value})
    _refresh_flat_weights(model)
    held = ModuleShards(model, params.plan, params.mesh)
    own = held.buffers_now()  # those that have these values stay: a list may hold them, too
    held.keep_buffers(model, {name: x for name, x in params.buffers.items() if not _are_alike(own.get(name), x)})
    return held


def _are_alike(x: Tensor | None, y: Tensor) -> bool:
    return x is not None and not x.is_meta and (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)


def taken_over(model: nn.Module, mesh: DeviceMesh, policy: Policy | Plan, params: Params) -> Params:
    """The tree that `shard` would make of a model, of the leaves of another one and with its buffers.

    Raises:
        ShardError: the leaves are not as `shard` would make them. On every rank.

    Communication: one small exchange over the mesh.
    """

    def facts(plan: Plan) -> list[str]:
        what = (
            "Trainer(params=...): the tree is not what this model, mesh and policy make. Pass sf.reshard(params, "
            "policy, mesh), or leave mesh and policy out to have those of the tree"
        )
        raise_problems(what, list(_misfits(model, mesh, plan, params)))
        return ["a tree of shards"]

    policy = policy.policy if isinstance(policy, Plan) else policy
    origin = initialize.Origin(model, None, None, later=True)
    plan, _, _ = initialize.agreed_plan(origin, mesh, policy, facts, "Trainer")
    return Params(params, plan, params.mesh, params.buffers)


def _misfits(model: nn.Module, mesh: DeviceMesh, plan: Plan, params: Params) -> Iterator[str]:
    """What of a tree is not as the plan of a model says."""
    if mesh != params.mesh:
        yield f"the mesh of the tree is {params.mesh}, not {mesh}"
        return
    grid = grid_of(mesh, plan.roles.storage)
    for name in dict.fromkeys((*plan.layouts, *params.plan.layouts)):
        mine, theirs = plan.layouts.get(name), params.plan.layouts.get(name)
        if mine is None or theirs is None:
            yield f"'{name}' is not in the {'model' if mine is None else 'tree'}"
        elif theirs.shape != mine.shape or not theirs.stored_as(mine):
            needed = f"{mine.shape} as '{mine.rule}'"
            yield f"'{name}' is {theirs.shape} as '{theirs.rule}' in the tree, and the model needs {needed}"
        else:
            yield from filter(None, (_misfit(plan, grid, leaf.name, params.get(leaf.name)) for leaf in mine.leaves))
    for name, _ in model.named_buffers(remove_duplicate=False):
        if name not in params.buffers:
            yield f"buffer '{name}' is not in the tree"


def _misfit(plan: Plan, grid: Grid, name: str, leaf: object) -> str | None:
    """Why a tensor is not a leaf of a plan."""
    if not isinstance(leaf, DTensor):
        return f"'{name}' is {'not there' if leaf is None else f'no shard but a {type(leaf).__name__}'}"
    want = buckets.leaf_spec(plan, grid, name)
    have = tuple(leaf.shape), leaf.dtype, leaf.placements, leaf.device_mesh
    needed = tuple(want.shape), plan.leaves[name][0].dtype, want.placements, want.mesh
    return None if have == needed else f"'{name}' is {have}, and its model needs {needed}"


def adopt(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> ModuleShards:
    """Find the leaves of `plan` in a model whose parameters are shards already.

    Raises:
        ShardError: a parameter is not laid out as the plan says.
    """
    held = ModuleShards(model, plan, mesh)
    grid = grid_of(mesh, plan.roles.storage)
    for name, leaf in held.leaves().items():
        if (why := _misfit(plan, grid, name, leaf)) is not None:
            raise ShardError(f"{why}: it was added, or replaced, after the model was wrapped")
    return held


@contextmanager
def whole_in_place(
    model: nn.Module, full: Mapping[str, Tensor], held: ModuleShards
) -> Iterator[dict[str, nn.Parameter]]:
    """Within it, the module has whole, ordinary parameters in the place of those shards of which `full` has values.

    What is yielded holds them by canonical name, at the end those that others have put there. The shards are as they
    were; the caller writes back what changed.

    Raises:
        ShardError: one was replaced by something that cannot be cut into the shards.
    """
    before: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id of a table: itself, and what was in it
    whole: dict[str, nn.Parameter] = {}
    for module, attribute, name, leaves in _owned(model, held.plan):
        if name not in full:
            continue
        table, keys = parameters_of(module), list(leaves.values())
        before.setdefault(id(table), (table, dict(table)))
        if name not in whole:
            whole[name] = nn.Parameter(full[name], held.plan.layouts[name].trainable)
            vars(whole[name])[STANDS_FOR] = table[keys[0]]
        for key in keys:
            del table[key]
        table[attribute] = whole[name]
    _refresh_flat_weights(model)
    try:
        yield whole
        for module, attribute, name, _ in _owned(model, held.plan):
            now = parameters_of(module).get(attribute)
            if name in whole and (now is None or now.shape != whole[name].shape):
                was = None if now is None else tuple(now.shape)
                raise ShardError(f"'{name}' was replaced by {was} while it was whole")
            if name in whole and now is not None:
                whole[name] = now
    finally:
        for table, had in before.values():
            table.clear()
            table.update(had)
        _refresh_flat_weights(model)


def require_no_gradients(whole: Mapping[str, nn.Parameter]) -> None:
    """Whole parameters whose shards are put back have got no gradients.

    Raises:
        ShardError: one has: it is that of this rank's samples, and would be lost.
    """
    if name := next((name for name, parameter in whole.items() if parameter.grad is not None), None):
        why = f"summon_full_params: '{name}' got a gradient within it, which is this rank's alone and would be lost"
        raise ShardError(f"{why}; call loss.backward() outside")


def _refresh_flat_weights(model: nn.Module) -> None:
    for module in map(unwrapped, model.modules()):
        if isinstance(module, nn.RNNBase):
            refresh_flat_weights(module, plain=True)
