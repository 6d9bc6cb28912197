"""shardfn: training models that do not fit one device, in the style of JAX, on PyTorch's own parts.

Each folder is a room; its docstring says what lives there and in which order to read.

    _torch       private names of torch            engine      when weights are gathered, gradients reduced
    notation     the text of rules; errors         trace       how each activation is sharded, found without data
    context      the transforms around a call      transforms  apply, value_and_grad, vmap, jit, shard_map
    layout       policies, plans, units, meshes    optim       optimizers of trees of shards
    comm         collectives and their buffers     checkpoint  trees in directories and safetensors
    binding      modules that read given weights   policies    rules for known kinds of models
    params       shard, gather, reshard            inspect     check, typeof, visualize, simulate
    random       dropout masks                     stateful    Trainer; modules that hold their shards
    parallel     tensor parallelism of layers      compat      FSDP1, FSDP2, hfai, Megatron
    watch        ranks that go apart are told      run         the launcher
    testing      ranks for tests, comparisons
"""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from shardfn import checkpoint, collectives, data, optim, policies, tree
from shardfn.inspect import Report, check, simulate, typeof, visualize
from shardfn.layout import MeshSpec, Plan, Policy, make_mesh, register
from shardfn.notation import ShardError, see as _see
from shardfn.parallel import cross_entropy
from shardfn.params import Params, gather, reduce_grads, reshard, shard
from shardfn.stateful import Progress, Trainer
from shardfn.trace import plan
from shardfn.transforms import apply, grad, hvp, jit, jvp, shard_map, value_and_grad, vjp, vmap

__version__ = "0.1.0"

__all__ = ["MeshSpec", "Params", "Plan", "Policy", "Progress", "Report", "ShardError", "Trainer", "apply", "check"]
__all__ += ["checkpoint", "collectives", "cross_entropy", "data", "gather", "grad", "hvp", "jit", "jvp", "make_mesh"]
__all__ += ["optim", "plan", "policies", "reduce_grads", "register", "reshard", "shard", "shard_map", "simulate"]
__all__ += ["tree", "typeof", "value_and_grad", "visualize", "vjp", "vmap"]

_ELSEWHERE = {
    "FullyShardedDataParallel": "from shardfn.compat.fsdp1 import FullyShardedDataParallel",
    "FSDP": "from shardfn.compat.fsdp1 import FullyShardedDataParallel",
    "clip_grad_norm_": "grads, norm = sf.optim.clip(grads, max_norm)",
    "fully_shard": "from shardfn.compat.fsdp2 import fully_shard",
    "load": "sf.checkpoint.load(path, like)",
    "save": "sf.checkpoint.save(path, params)",
}


def __getattr__(name: str) -> _ModuleType:
    """`sf.testing` is imported when it is first used: programs that train do not need it."""
    if name == "testing":
        return _import_module("shardfn.testing")
    where = _ELSEWHERE.get(name)
    error = AttributeError(f"module 'shardfn' has no attribute '{name}'{f'; write {where}' if where else ''}")
    raise error if where is None else _see(error, "names")
