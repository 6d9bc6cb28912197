"""Files in the safetensors format into shards and back, each rank its own parts.

Reading, every rank reads what it keeps. Writing, the first rank gets one parameter after the other in small messages,
so that it never has more than one whole.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn import layout
from shardfn._torch import part_of_rank
from shardfn.checkpoint import stored_names, tensor_files
from shardfn.checkpoint.leaves import fill
from shardfn.checkpoint.stored_names import Model, Names, Patchwork, Piece
from shardfn.checkpoint.tensor_files import AnyPath, Described, FilesPlan, TensorFiles, TensorWriter
from shardfn.comm import agree, empty_shards, failing_together
from shardfn.layout import Box, Layout, Plan, Policy, matches, narrowed
from shardfn.notation import ShardError, did_you_mean, raise_problems
from shardfn.params import NewTree, Origin, Params, agreed_plan, moving, require_reduced


def load_safetensors(
    path: AnyPath | Sequence[AnyPath],
    model: nn.Module | Mapping[str, Tensor],
    mesh: DeviceMesh,
    policy: Policy | Plan,
    *,
    init: Callable[[Any], Any] | None = None,
    names: Names | None = None,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
) -> Params:
    """Split the weights in safetensors files over a mesh, as `shard` does those of a model; each rank reads its parts.

    For a model of the transformers library, files have the names and shapes that its `from_pretrained` reads: with or
    without the prefix of the base model, of older versions, with one tensor for each expert. The model's own values
    are not used, so make it on the meta device.

        >>> import tempfile, shardfn as sf
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, f"{folder}/model.safetensors")
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4, 2)
        >>> params = sf.checkpoint.load_safetensors(folder, model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> sf.gather(params)["weight"].tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]

    Args:
        path: a directory with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names;
            such an index; a file; or a list of files. It may be on a disk of each rank.
        model: as in `shard`. Shards have the dtype of its parameters, and values of another one are rounded to it as
            they are read.
        mesh: as in `shard`.
        policy: as in `shard`.
        init: fills meta tensors that the files do not have, as in `shard`; by default, for a model of transformers,
            what it does itself. Buffers that are not persistent are in no file.
        names: what the model's tensors are called in the files: a function of the model's name, or a dict.
        strict: whether a tensor that is missing, or that the model does not have, is an error. If not, the model's own
            value counts, or what `init` makes. Of tied tensors one name is enough.
        only: patterns of the parameters to read, as in `params.select`: the tree has no others, and no buffers. Put it
            onto one of the whole model by `params | part`.

    Returns:
        the tree, with persistent buffers from the files in `params.buffers`.

    Raises:
        FileNotFoundError: no files.
        ShardError: naming all tensors that are missing, unexpected or of another shape, before any memory is taken; a
            file that is damaged, or that other ranks do not have; what `shard` raises. On every rank.

    Communication: two small exchanges over the mesh.
    """
    origin = Origin(model, init or stored_names.own_init(model), later=True)
    files = _Files(path, origin, names, strict, only)
    plan, grid, seed = agreed_plan(origin, mesh, policy, files.open, "load_safetensors")
    tree = NewTree(plan, mesh, grid, {}, {})
    with failing_together(mesh, "load_safetensors"), closing(files.opened):
        files.fill(tree)
        if not files.partial:
            tree.fill(origin, seed, files.held)
            files.fill_buffers(tree)
    return tree.wrapped()


class _Files:
    """The tensors of a model that are in files."""

    def __init__(self, path: Any, origin: Origin, names: Names | None, strict: bool, only: Any) -> None:
        self._path, self._origin, self._model, self._names, self._strict = path, origin, origin.model, names, strict
        self._only, self.partial = (only,) if isinstance(only, str) else tuple(only or ()), only is not None
        self.held: dict[str, list[Patchwork]] = {}  # first name -> what it is made of, once for each name in the files

    def open(self, plan: Plan) -> list[str]:
        """Find every tensor, or raise all that does not fit; returns what the ranks must have in common."""
        self.opened = TensorFiles(self._path)
        stored = {name: x.shape for name, x in self.opened.tensors.items()}
        wanted, unexpected = stored_names.wanted_from(self._model, stored, self._names)
        problems = [f"'{name}' is in the files and not in the model" for name in unexpected if self._strict]
        for names, shape, dtype in self._asked_for(plan):
            if patchworks := [wanted[name] for name in names if name in wanted]:
                self.held[names[0]] = patchworks
                problems += (why for x in patchworks for why in self._misfits(names[0], x, shape, dtype))
            else:
                problems += self._missing(names)
        raise_problems(f"load_safetensors: '{self._path}' does not fit the model", problems, entry="checkpoints")
        facts = self._origin.facts(not self.partial, self.held)
        return [f"files with the tensors {self.opened.digest}", f"only={self._only}", *facts]

    def _asked_for(self, plan: Plan) -> list[tuple[tuple[str, ...], tuple[int, ...], torch.dtype]]:
        """(names, shape, dtype) of what is to be read: all, or the parameters that `only` matches."""
        for pattern in self._only:
            if not any(matches(pattern, name) for name in plan.canonical):
                near = did_you_mean(pattern, plan.canonical)
                raise ShardError(f"load_safetensors: only={pattern!r} matches no parameter of the model{near}")
        params = [(x.names, x.shape, x.dtype) for x in plan.layouts.values()]
        if self.partial:
            return [x for x in params if layout.first_match(self._only, x[0]) is not None]
        return [*params, *((names, tuple(x.shape), x.dtype) for x, names in _buffers(self._model))]

    def _missing(self, names: Sequence[str]) -> list[str]:
        """What is wrong when none of the names of a tensor is in the files."""
        name = names[0]
        persists = not set(stored_names.persistent_names(self._model)).isdisjoint(names)
        needed = self.partial or (persists and not stored_names.is_ignored(self._model, "missing", name))
        if self._strict and needed:
            return [f"'{name}' is not in the files"]
        tensors = layout.named_parameters(self._model) | layout.named_buffers(self._model)
        if not self.partial and self._origin.init is None and tensors[name].is_meta:
            return [f"'{name}' is not in the files and on the meta device; pass init= to fill it"]
        return []

    def _misfits(self, name: str, patchwork: Patchwork, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        sources = [piece.source for piece in patchwork.pieces]
        several = f", made of {len(sources)} tensors such as '{sources[0]}'," if len(sources) > 1 else ""
        if patchwork.shape != shape:
            return [f"'{name}'{several} is {patchwork.shape} in the files, {shape} in the model"]
        have = {self.opened.tensors[source].dtype for source in sources}
        bad = next((x for x in have if x != dtype and not (_is_wide(x) and _is_wide(dtype))), None)
        return [f"'{name}'{several} is {bad} in the files, {dtype} in the model"] if bad is not None else []

    def fill(self, tree: NewTree) -> None:
        """Read what this rank has of the parameters; a `partial` tree has no others."""
        layouts = [one for one in tree.plan.layouts.values() if one.name in self.held]
        dtypes = {leaf.name: one.dtype for one in layouts for leaf in one.leaves}
        tree.shards = empty_shards(tree.plan, tree.grid, dtypes if self.partial else None)
        for one in layouts:
            for leaf in one.leaves:
                fill(one, leaf, tree.grid, tree.shards[leaf.name], partial(self._read, one.name))

    def fill_buffers(self, tree: NewTree) -> None:
        """Read the buffers that are in the files."""
        for like, names in _buffers(self._model):
            if names[0] in self.held:
                box = tuple((0, n) for n in like.shape)
                value = torch.empty(like.shape, dtype=like.dtype)
                self._read(names[0], [(box, box)], value)
                tree.buffers |= dict.fromkeys(names, value.to(tree.grid.device))

    def _read(self, name: str, boxes: Sequence[tuple[Box, Box]], out: Tensor) -> None:
        first, *others = self.held[name]
        self._assemble(first, boxes, out)
        for other in others:
            again = torch.zeros_like(out)
            self._assemble(other, boxes, again)
            if not torch.equal(out.view(-1).view(torch.uint8), again.view(-1).view(torch.uint8)):
                names = " and ".join(f"'{x.pieces[0].source}'" for x in (first, other))
                why = f"load_safetensors: the model ties '{name}', and the files have different values of it: {names}"
                raise ShardError(f"{why}. Make the model without that tie, or leave one out of the files.")

    def _assemble(self, made_of: Patchwork, boxes: Sequence[tuple[Box, Box]], out: Tensor) -> None:
        """Read what lies in boxes of a tensor to their places in `out`."""
        for box, local in boxes:
            place = narrowed(out, local)
            for part in filter(None, (piece.within(box) for piece in made_of.pieces)):
                inside = tuple((at - start, n) for (at, n), (start, _) in zip(part.here, box, strict=True))
                self.opened.read(part.source, part.there, part.as_in_source(narrowed(place, inside)))


def _is_wide(dtype: torch.dtype) -> bool:
    """Whether a dtype holds values that stand for themselves: those of one byte come with scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _buffers(model: Model) -> list[tuple[Tensor, tuple[str, ...]]]:
    return layout.by_all_names(layout.named_buffers(model).items())


def save_safetensors(
    path: AnyPath,
    model: nn.Module | Mapping[str, Tensor],
    params: Params,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> Path:
    """Write shards as `model.safetensors`, or as several files and their index, as `save_pretrained` would.

    The first rank writes and has one parameter at a time whole. Files have their names when all are complete; those of
    an older save in that directory go then. For a model of transformers they hold what its `save_pretrained` writes,
    and `from_pretrained` reads them beside a `config.json`: `model.config.save_pretrained(path)` on one rank.

    A path that ends in `.safetensors` is one file, beside which others stay. It may have a part of the tree, such as
    `params.select("**.{A,B}.weight")`, and `load_safetensors(..., only="**.{A,B}.weight")` reads it.

        >>> import tempfile, shardfn as sf
        >>> model = nn.Linear(4, 2)
        >>> params = sf.shard(model, sf.make_mesh("cpu", fsdp=1), sf.Policy())
        >>> folder = sf.checkpoint.save_safetensors(tempfile.mkdtemp(), model, params)
        >>> from safetensors.torch import load_file
        >>> load_file(folder / "model.safetensors")["bias"].equal(model.bias)
        True

    Args:
        path: the directory, or a file in one.
        model: which the tree is of, for names and for which buffers are persistent; it may be on the meta device.
        params: a tree with all of its parameters (or averages of them); of buffers the first rank's are written. For
            one file also a tree with some of them, and then no buffers.
        max_shard_size: of one file of a directory, in bytes or as in `"5GB"`; a larger tensor has a file of its own.
        dtype: of floating tensors in the files; default: their own.
        names: what the model's tensors are called in the files, as in `load_safetensors`.

    Returns:
        the path.

    Raises:
        ShardError: the tree is not of this model; a tensor that the format does not have; what the first rank cannot
            write, on the others too.
        OSError: what the first rank cannot write, there.

    Communication: every parameter to the first rank, which receives what it lacks, and one small exchange each.
    """
    if not isinstance(params, Params):
        raise TypeError(f"save_safetensors: expected a tree made by shard, got {type(params).__name__}")
    plan: Plan | Exception = params.plan
    facts, files, pieces = [f"path '{path}'"], None, {}
    target = Path(path)
    is_file = target.suffix == ".safetensors"
    try:
        tensors, pieces = _decide(model, params, dtype, names, is_file)
        if is_file:
            files = FilesPlan((tensor_files.plan_file(target.name, tensors),), alone=True)
        else:
            numel = sum(layout.numel for layout in params.plan.layouts.values())
            files = tensor_files.plan_files(tensors, max_shard_size, numel)
        facts.append(f"files {files.digest}")
    except Exception as error:  # the other ranks must hear of it before it is raised
        plan = error
    agree(params.mesh, plan, facts, "save_safetensors")
    assert files is not None
    export = _Export(params, dtype, target.parent if is_file else target, files, pieces)
    with closing(export.writer):
        export.attempt(export.writer.open)
        for layout in _held(params):
            full = export.collect(layout)
            export.attempt(export.write, layout.names, full)
            del full  # the next one is not made before this one is gone
        for _, buffer_names in _buffers(model) if _is_whole(params) else ():
            export.attempt(export.write, buffer_names, export.as_written(params.buffers[buffer_names[0]]))
        export.attempt(export.writer.finish)
    return Path(path)


def _decide(
    model: Model, params: Params, dtype: torch.dtype | None, names: Names | None, is_file: bool
) -> tuple[dict[str, Described], dict[str, list[Piece]]]:
    """What the files will have, and for each name in the model where its parts are in them."""
    _require_same_model(model, params)
    missing = next((name for name in params.plan.leaves if name not in params), None)
    if missing is not None and not is_file:
        instead = "write a part of them into a file of its own: 'adapters.safetensors', say"
        why = f"'{missing}' is not in the tree, and a directory has all parameters of a model"
        raise ShardError(f"save_safetensors: {why}; {instead}")
    have: dict[str, Described] = {}
    for one in _held(params):
        missing = next((leaf.name for leaf in one.leaves if leaf.name not in params), None)
        if missing is not None:
            raise ShardError(f"save_safetensors: '{missing}' is not in the tree, which has the rest of '{one.name}'")
        leaf = params[one.leaves[0].name]
        require_reduced("save_safetensors", one.name, leaf)
        have[stored_names.kept_name(model, one.names)] = one.shape, _written(leaf.dtype, dtype)
    for _, all_names in _buffers(model) if _is_whole(params) else ():
        if (buffer := params.buffers.get(all_names[0])) is not None:
            have[stored_names.kept_name(model, all_names)] = tuple(buffer.shape), _written(buffer.dtype, dtype)
    sources = {name: Patchwork.of(name, have[name][0]) for name in stored_names.persistent_names(model) if name in have}
    files = stored_names.files_of(model, sources, names)
    tensors: dict[str, Described] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, patchwork in files.items():
        dtypes = {have[piece.source][1] for piece in patchwork.pieces}
        if len(dtypes) > 1:
            raise ShardError(f"save_safetensors: '{name}' would be made of tensors of {sorted(map(str, dtypes))}")
        tensors[name] = patchwork.shape, dtypes.pop()
        for piece in patchwork.pieces:
            pieces.setdefault(piece.source, []).append(piece.inverse(name))
    return tensors, pieces


def _held(params: Params) -> list[Layout]:
    """The parameters of which leaves are in a tree."""
    return [layout for layout in params.plan.layouts.values() if any(leaf.name in params for leaf in layout.leaves)]


def _is_whole(params: Params) -> bool:
    return all(name in params for name in params.plan.leaves)


def _written(have: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and have.is_floating_point else have


def _require_same_model(model: Model, params: Params) -> None:
    """The tree has what the model has."""
    theirs = {*layout.named_parameters(model), *layout.named_buffers(model)}
    tree = {name for one in params.plan.layouts.values() for name in one.names}
    if _is_whole(params):
        tree |= params.buffers.keys()
    else:
        theirs &= tree
    problems = [f"'{name}' is not in the {'model' if name in tree else 'tree'}" for name in sorted(theirs ^ tree)]
    raise_problems("save_safetensors: the tree is not of this model", problems, entry="checkpoints")


class _Export:
    """What a rank does to write a tree: the first one writes what the others send."""

    def __init__(
        self, params: Params, dtype: torch.dtype | None, path: Path, files: FilesPlan, pieces: dict[str, list[Piece]]
    ) -> None:
        self._params, self._dtype, self._pieces = params, dtype, pieces
        self._places = layout.grid_of(params.mesh, params.plan.roles.storage)
        self._first = self._places.ranks[0]
        self._is_first = not self._places.exchanges or dist.get_rank() == self._first
        self.writer = TensorWriter(path, files)

    @cached_property
    def _host(self) -> Tensor:
        """Memory for the largest parameter, which all take in turn: an allocator may keep what each would take."""
        sizes = [x.numel * self._dtype_of(x).itemsize for x in _held(self._params)]
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, device="cpu")

    def _dtype_of(self, layout: Layout) -> torch.dtype:
        return _written(self._params[layout.leaves[0].name].dtype, self._dtype)

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Do a step on the first rank; when it fails, all raise."""
        with failing_together(self._params.mesh, "save_safetensors"):
            if self._is_first:
                step(*args)

    def write(self, names: Sequence[str], full: Tensor) -> None:
        """Write all parts of a whole tensor that are in files."""
        for piece in [piece for name in names for piece in self._pieces.get(name, [])]:
            self.writer.write(piece.source, piece.there, piece.as_in_source(narrowed(full, piece.here)))

    def as_written(self, whole: Tensor) -> Tensor:
        """A whole tensor of the first rank in host memory."""
        value = part_of_rank(whole, self._first).detach()
        return value.to("cpu", _written(value.dtype, self._dtype))

    def collect(self, layout: Layout) -> Tensor | None:
        """A whole parameter on the first rank, in host memory."""
        full, dtype = dict[str, Tensor](), self._dtype_of(layout)
        if self._is_first:
            full[layout.name] = self._host[: layout.numel * dtype.itemsize].view(dtype).view(layout.shape)
        moving.collect(self._params, {layout.name: dtype}, self._first, full)
        return part_of_rank(full.get(layout.name), self._first)
