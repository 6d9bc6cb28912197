"""Trees as state dicts: under the model's names and in the model's shapes, still sharded, and back.

What is fused, padded or stored with one dim per factor is gathered and split evenly. Checkpoints do without: they have
boxes of the model's tensors, see `checkpoint`.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfn import comm
from shardfn._torch import dtensor_spec, unwrap_local, wrap_local
from shardfn.comm import buckets
from shardfn.layout import Layout, chunk, grid_of
from shardfn.params import initialize, sharding
from shardfn.params.tree import Params


def to_state_dict(params: Params) -> dict[str, Tensor]:
    """The tree under the model's names and in the model's shapes, still sharded; tied parameters under each name.

    A parameter stored in the model's shape is the leaf itself; one that is stored with one dim per factor, in blocks or
    padded is gathered and split evenly on its first dim.

    Args:
        params: a tree made by `shard`, or one with its layouts.
    """
    out: dict[str, Tensor] = {}
    for layout in sharding.selected_layouts(params, None):
        tensor = params[layout.name] if layout.plain else _model_shaped(params, layout)
        out |= dict.fromkeys(layout.names, tensor)
    return out


def from_state_dict(like: Params, state: Mapping[str, Tensor]) -> Params:
    """A tree laid out as `like`, from tensors under the model's names: full ones or `DTensor`s.

    It has the parameters that are in `state`.

    Raises:
        ShardError: a `DTensor` that was another rank's, or is on ranks outside of this mesh, as a pickled one may be.
    """
    grid = grid_of(like.mesh, like.plan.roles.storage)
    tree = initialize.NewTree(like.plan, like.mesh, grid, {}, like.buffers)
    for layout in sharding.selected_layouts(like, None):
        value = next((state[name] for name in layout.names if name in state), None)
        if value is None:
            continue
        spec = buckets.leaf_spec(like.plan, grid, layout.name, value.dtype) if layout.plain else None
        if isinstance(value, DTensor):
            comm.require_own_part(f"'{layout.name}'", value, grid.ranks)
            if spec is not None and value.device_mesh == spec.mesh and tuple(value.placements) == spec.placements:
                tree.shards[layout.name] = unwrap_local(value)
                continue
        tree.shards |= buckets.empty_shards(like.plan, grid, {leaf.name: value.dtype for leaf in layout.leaves})
        tree.cut(layout, buckets.whole(value) if isinstance(value, DTensor) else value)
    leaves = tree.wrapped()
    return like.like((name, leaves[name]) for name in like if name in leaves)


def _model_shaped(params: Params, layout: Layout) -> Tensor:
    """A DTensor of model shape, split on dim 0 over the last axis of the storage mesh; one without dims is plain."""
    full = sharding.gather(params, layout.name)[layout.name].detach()
    *others, last = params.plan.roles.storage
    grid = grid_of(params.mesh, (*others, last))
    local = full.narrow(0, *chunk(full.shape[0], grid.sizes[last], grid.coords[last])).clone()
    placements = [*(Replicate() for _ in others), Shard(0)]
    return wrap_local(local, dtensor_spec(grid.storage, placements, full.shape, full.dtype))
