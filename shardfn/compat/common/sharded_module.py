"""Modules of classes that shard in place: what they know, the policy of a tree of them, its run, loads.

`fsdp1.Instance` and `fsdp2.Group` are the two kinds. A tree is of one kind: what is below the module that is called.

Gathers stay outside of compiled graphs, and a graph ends where a unit begins. So what is compiled is the forward of
every sharded module that holds no other one; `torch.compile(model)`, or a compiled function that calls the model, says
how at the call, by the context that it runs in.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from shardfn._torch import move_to_mesh, parameters_of, pytree, seen_by_dynamo, unwrap_local, version_of
from shardfn.binding import GraphBreak, module_tables
from shardfn.comm import agree_on, buckets
from shardfn.compat.common.meshes import spread
from shardfn.layout import OWN, Policy, Reduction, exactly, may_be_differentiated, mesh, planning, shards_in, unwrapped
from shardfn.notation import ShardError
from shardfn.params import initialize
from shardfn.stateful import ModuleShards, adopt, bound, install
from shardfn.watch import call, watch_for

RECORD = f"{OWN}record"  # the key of a `Sharded` in the dict of each of its modules
_BLANK = f"{OWN}blank"  # the key of the version that a tensor had when `to_empty` made it
_TREES = f"{OWN}trees"  # the key of the plans of the tree below a module, by whether they are in full precision


@dataclass(eq=False, kw_only=True)
class Sharded:
    """What one call of a constructor or of `fully_shard` was asked, and how things stand."""

    verb: ClassVar[str]  # who speaks in errors

    mesh: DeviceMesh
    data: tuple[str, ...]  # its axes that split the batch, the last one weights too
    device: torch.device  # where it computes
    offload: bool  # whether shards are kept on the host
    placed: DeviceMesh | None = None  # of the parameters that `parallelize_module` had split before
    ignored_params: list[nn.Parameter] = field(default_factory=list)
    is_root: bool | None = None  # None before the first forward
    syncs: bool = True  # whether gradients are reduced
    all_reduces: bool = True  # whether reductions go on over the axis that replicates
    reduction: Reduction = "mean"  # what reduces gradients
    scale: float = 1.0  # of gradients, beside the mean over ranks
    is_whole: bool = False  # whether whole parameters stand in the places of all shards, and compute
    version: int = 0  # counts changes of what a plan is made from: one that was made before is no good any more
    has_run: bool = False  # since memory was made

    @classmethod
    def has_sharded(cls, module: nn.Module) -> bool:
        """Whether a class of this kind has sharded a module."""
        return isinstance(module.__dict__.get(RECORD), cls)

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """What a sharded module knows."""
        return module.__dict__[RECORD]

    @classmethod
    def all_in(cls, module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, nn.Module, Self]]:
        """(name, module, what it knows) of every module of this kind in a tree, in its order, or of the first alone."""
        named = module.named_modules() if recurse else [("", module)]
        return ((name, one, cls.of(one)) for name, one in named if cls.has_sharded(one))

    @property
    def first_rank(self) -> int:
        """The rank whose values count where those of one do."""
        return int(self.mesh.mesh.flatten()[0])

    @property
    def holds_back(self) -> bool:
        """Whether gradients stay on each rank, to be reduced with those of a later backward."""
        return not self.syncs or (not self.all_reduces and len(self.data) > 1)

    def unit_settings(self, exact: bool) -> dict[str, Any]:
        """What a policy says of it as a unit; `exact`: in full precision."""
        raise NotImplementedError

    def root_settings(self, exact: bool) -> dict[str, Any]:
        """What a policy says of it as the root."""
        raise NotImplementedError

    def rules(self, module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
        """Rules of those parameters of the tree below `module` that are not split as the default is."""
        raise NotImplementedError

    def is_exact(self, module: nn.Module) -> bool:
        """Whether calls of its module are in full precision now."""
        return False

    def note_root(self, module: nn.Module) -> None:
        """Take note of whether it is a root, now that there is a plan of the tree below its module."""

    def put_back(self) -> None:
        """Have the shards in their places that whole weights took."""

    def begin(self, module: nn.Module, tree: "Tree") -> None:
        """What goes before a call of its module that no other call is around."""


@dataclass
class Tree:
    """A plan of the tree below a module, and the units that it is made from, by name."""

    units: dict[str, Sharded]
    held: ModuleShards
    versions: list[int]

    @property
    def fits(self) -> bool:
        return self.held.fits and self.versions == [unit.version for unit in self.units.values()]


def own_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of what a sharded module holds, itself included, and no other sharded one inside it does."""
    inner = {id(one) for name, inside, _ in Sharded.of(module).all_in(module) if name for one in inside.modules()}
    return [(name, one) for name, one in module.named_modules() if id(one) not in inner]


def ignored_in(module: nn.Module, kind: type[Sharded]) -> set[int]:
    """The ids of the parameters that what is sharded in a tree leaves alone."""
    return {id(parameter) for _, _, inner in kind.all_in(module) for parameter in inner.ignored_params}


def policy_of(module: nn.Module, record: Sharded, leave: Set[int] = frozenset(), exact: bool = False) -> Policy:
    """The policy that a tree of sharded modules means.

    Args:
        module: the outermost one.
        record: what it knows.
        leave: ids of parameters to leave out.
        exact: in full precision.

    Raises:
        ShardError: modules differ in what only a whole tree can have.
    """
    units: dict[str, dict[str, Any]] = {}
    for name, _, inner in record.all_in(module):
        if inner.mesh != record.mesh:
            why = f"{name!r} was sharded over another mesh ({inner.mesh}) than the module around it ({record.mesh})"
            alone = "; what a rank has by itself is not wrapped, but left out: ignored_modules, ignored_params"
            raise ShardError(f"{record.verb}: {why}; use the same one{alone if inner.mesh.size() == 1 else ''}")
        if inner.offload != record.offload:
            why = f"{name!r} and the module around it have different offload policies"
            raise ShardError(f"{record.verb}: {why}; use one: offload all of them, or none")
        if name:
            units[exactly(name)] = inner.unit_settings(exact)
    left = leave | {id(p) for p in record.ignored_params} | ignored_in(module, type(record))
    named = dict(module.named_parameters(remove_duplicate=False))
    rules = record.rules(module, {name: p for name, p in named.items() if id(p) not in left})
    ignore = [exactly(name) for name, p in named.items() if id(p) in left]
    settings = {"batch": record.data, "offload": "cpu" if record.offload else None, **record.root_settings(exact)}
    return Policy(rules=rules, ignore=ignore, **settings | {"units": units | settings.get("units", {})})


def spread_inside(module: nn.Module, record: Sharded) -> None:
    """What was sharded inside over fewer axes gets the mesh of this one."""
    for _, inside, inner in record.all_in(module):
        if spread(inside, inner.mesh, record.mesh):
            inner.mesh, inner.data, inner.placed = record.mesh, record.data, record.placed
            inner.version += 1


def put_shards(record: Sharded, module: nn.Module, origin: initialize.Origin) -> None:
    """Shard the parameters in a tree that are no shards yet; buffers stay the tensors that they are where they can.

    Args:
        record: what the tree is to know.
        module: the tree.
        origin: where its values come from.
    """
    if not _OUTSIDE:
        _OUTSIDE.append(GraphBreak(_run_and_compile))
    before = dict(module.named_buffers(remove_duplicate=False)) if origin.src is None else {}
    kept = {name for name, x in before.items() if x.device == record.device or (origin.later and x.is_meta)}
    watch_for(module, record.mesh)
    params = initialize.shard_own(origin, record.mesh, policy_of(module, record, shards_in(module)))
    params.buffers = {name: new for name, new in params.buffers.items() if name not in kept}
    install(module, params)


def current_shards(module: nn.Module) -> ModuleShards:
    """The leaves of the tree below a sharded module, as one plan; see `_tree_now`."""
    return _tree_now(module, exact=False).held


def _tree_now(module: nn.Module, exact: bool) -> Tree:
    """The plan of the tree below a module; planned again when anything that it depends on has changed.

    Raises:
        ShardError: a parameter is no shard, or no longer laid out as it was.
    """
    trees = module.__dict__.setdefault(_TREES, {})
    if exact not in trees or not trees[exact].fits:
        record = Sharded.of(module)
        units = {name: inner for name, _, inner in record.all_in(module)}
        for unit in units.values():
            unit.put_back()
        plan = planning.plan(module, record.mesh, policy_of(module, record, exact=exact))
        trees[exact] = Tree(units, adopt(module, plan, record.mesh), [unit.version for unit in units.values()])
    if (record := Sharded.of(module)).is_root is None:
        record.note_root(module)
    return trees[exact]


def run(module: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a sharded module; inside of another one's call, that of its model.

    A function that somebody compiles, and that calls the module, calls this out of Dynamo's sight.
    """
    if seen_by_dynamo():
        return _OUTSIDE[0](module, method, args, kwargs)
    if module_tables.is_computing(module):
        return bound(module, method)(*args, **kwargs)
    record = Sharded.of(module)
    tree = _tree_now(module, record.is_exact(module))
    record.begin(module, tree)
    held, units = tree.held, tree.units
    if record.device.type != "cpu":
        args, kwargs = pytree.tree_map(lambda x: x.to(record.device) if isinstance(x, Tensor) else x, (args, kwargs))
    if record.is_whole:
        return held.run(module, None, method, args, kwargs)
    params = held.params(record.reduction, holds_back=lambda unit: units[unit].holds_back)
    if any(unit.scale != 1 for unit in units.values()):
        params.scale_of_gradients = lambda unit: units[unit].scale
    with call(record.mesh, f"call the model's {method}"):
        if not all(unit.has_run for unit in units.values()):
            _look_before_first_run(module, record)
            for unit in units.values():
                unit.has_run = True
        return held.run(module, params, method, args, kwargs)


class FillsBlanks(TorchFunctionMode):
    """Within it `to_empty` fills memory with NaN, so that what nobody fills afterwards is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.empty_like and may_be_differentiated(out):
            unwrap_local(out).detach().fill_(float("nan"))
            self.made = True
        return out


def note_blanks(record: Sharded, module: nn.Module) -> None:
    """Take note of what `to_empty` made for a module, and is still full of NaN."""
    record.has_run = False
    for x in (*module.parameters(), *module.buffers()):
        local = unwrap_local(x).detach()
        if not local.is_meta and may_be_differentiated(local) and bool(local.isnan().all()):
            vars(x)[_BLANK] = version_of(local)


def _look_before_first_run(module: nn.Module, record: Sharded) -> None:
    """What `to_empty` made was filled, and replicas have the same values.

    Raises:
        ShardError: some tensors were not, or ranks have other values of the same part.

    Communication: with an axis that replicates, one small all-gather over it.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    made = [(name, x, unwrap_local(x).detach()) for name, x in named if _BLANK in vars(x)]
    may_be = ((n, x) for n, p, x in made if isinstance(p, nn.Parameter) or version_of(x) == vars(p)[_BLANK])
    blank = [name for name, x in may_be if not x.is_meta and bool(x.isnan().any())]  # a buffer may be filled with NaN
    if blank:
        why = f"{len(blank)} tensors have memory of to_empty() that nobody has filled, the first is '{blank[0]}'"
        instead = "Call reset_parameters() of the modules that own them, init functions, or load_state_dict"
        raise ShardError(f"{record.verb}: {why}. {instead}")
    for _, x, _ in made:
        del vars(x)[_BLANK]
    if len(record.data) > 1:
        shards = ((name, x) for name, x in module.named_parameters() if isinstance(x, DTensor))
        facts = [f"values of '{name}' {initialize.sampled(unwrap_local(x))}" for name, x in shards]
        agree_on(record.mesh[record.data[0]], record.verb, facts, instead=". Write torch.manual_seed(0) on every rank")


_OUTSIDE: list[GraphBreak] = []  # one, as soon as anything is sharded: it imports Dynamo, as a backward does


def _run_and_compile(module: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """`run`, where a graph ended for it: units are compiled as the function around is.

    What `torch.compile` was asked for there, the context says that this call runs in.
    """
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    frame: Any = sys._getframe(1)
    while frame is not None:
        context: Any = frame.f_locals.get("self") if frame.f_code.co_name == "compile_wrapper" else None
        if isinstance(context, dynamo.OptimizeContext):
            backend = dynamo.innermost_backend(context.callback)
            compile_units(module, backend=backend, dynamic=getattr(context, "_dynamic", None))
            break
        frame = frame.f_back
    return run(module, method, args, kwargs)


def compile_units(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`compile(*args, **kwargs)` on every sharded module in a tree that holds no other one and is not compiled yet."""
    for _, inside, record in Sharded.of(module).all_in(module):
        unit = unwrapped(inside)
        if len(list(record.all_in(inside))) == 1 and unit._compiled_call_impl is None:
            unit.compile(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Whole tensors, DTensors of other layouts and `ShardedTensor`s, copied into shards, or put in their place


class CopiesIntoShards(TorchFunctionMode):
    """Within it, copying a whole tensor into a shard takes this rank's part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], DTensor):
            shard: DTensor = args[0]
            unwrap_local(shard).copy_(unwrap_local(laid_out(args[1], shard)))
            return shard
        return func(*args, **(kwargs or {}))


def laid_out(value: Any, like: DTensor, name: str = "a value") -> Tensor:
    """A tensor of any layout in that of another one; itself where it has it already.

    Raises:
        ShardError: it is another rank's.
    """
    if isinstance(value, DTensor):
        _require_own_part(name, value, like)
        if value.placements == like.placements and value.device_mesh == like.device_mesh:
            return value.detach()
        value = buckets.whole(value)
    full = whole_of(value).detach().to(unwrap_local(like).device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def _require_own_part(name: str, value: DTensor, like: DTensor) -> None:
    """The local part of a pickled DTensor is that of the rank which pickled it, whoever reads the file.

    Raises:
        ShardError: that was another rank.
    """
    ranks = {rank for mesh in (value.device_mesh, like.device_mesh) for rank in mesh.mesh.flatten().tolist()}
    buckets.require_own_part(f"load_state_dict: {name}", value, sorted(ranks))


class StayTogether:
    """Hooks around `load_state_dict(assign=True)`: what was one shard before is one again, on the mesh where it was.

    Of several new ones the first counts. Their mesh may be one of the same ranks with other names, or with none.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        named = [each for module in modules for each in module.named_modules()]
        self._tables = [(f"{path}." if path else "", parameters_of(inside)) for path, inside in named]
        self._shards: dict[int, tuple[str, DTensor, list[tuple[dict[str, Any], str]]]] = {}

    def before(self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Take note of where each shard is.

        Raises:
            ShardError: a new one is another rank's; once it is a parameter, torch may have given it this rank's mesh.
        """
        self._shards.clear()
        for path, table in self._tables if metadata.get("assign_to_params_buffers") else ():
            for key, parameter in table.items():
                if isinstance(parameter, DTensor):
                    name = prefix + path + key
                    if isinstance(new := state_dict.get(name), DTensor):
                        _require_own_part(repr(name), new, parameter)
                    self._shards.setdefault(id(parameter), (name, parameter, []))[2].append((table, key))

    def after(self, *_: Any) -> None:
        """Put the new ones there.

        Raises:
            ShardError: one is no DTensor.
        """
        for name, old, slots in self._shards.values():
            new = next((now for table, key in slots if (now := table[key]) is not old), old)
            if not isinstance(new, DTensor):
                instead = "out, or give it distribute_tensor(value, shard.device_mesh, shard.placements)"
                why = f"{name!r} is whole, and would replace a shard. Leave assign=True {instead}"
                raise ShardError(f"load_state_dict(assign=True): {why}.")
            if new.device_mesh != old.device_mesh and torch.equal(new.device_mesh.mesh, old.device_mesh.mesh):
                move_to_mesh(new, old.device_mesh, new.placements)
            for table, key in slots:
                table[key] = new
        self._shards.clear()


def whole_of(value: Any) -> Any:
    """The whole tensor in a `ShardedTensor`; other values as they are.

    Communication: one all-reduce of the whole tensor over the ranks that share it.
    """
    if not isinstance(value, ShardedTensor):
        return value
    metadata, shards = value.metadata(), value.local_shards()
    placement = metadata.shards_metadata[0].placement
    kind = placement.device().type if placement is not None else "cpu"
    device = shards[0].tensor.device if shards else mesh.device_of(kind)
    full = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for shard in shards:
        places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        full[tuple(slice(start, start + length) for start, length in places)] = shard.tensor
    dist.all_reduce(full, group=value._process_group)
    return full
