"""shardfn: training models that do not fit one device, in the style of JAX, on PyTorch's own parts. Layer 7."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from shardfn import checkpoint, collectives, data, optim, policies, tree
from shardfn.core.apply import apply
from shardfn.core.check import Report, check, simulate
from shardfn.core.errors import ShardError
from shardfn.core.functional import gather, reduce_grads, reshard, shard
from shardfn.core.inspect import typeof, visualize
from shardfn.core.jit import jit
from shardfn.core.loss import cross_entropy
from shardfn.core.mesh import MeshSpec, make_mesh
from shardfn.core.model import register
from shardfn.core.plan import Plan
from shardfn.core.policy import Policy
from shardfn.core.shard_map import shard_map
from shardfn.core.torch_func import hvp, jvp, vjp, vmap
from shardfn.core.transforms import grad, value_and_grad
from shardfn.core.tree import Params
from shardfn.core.trial import plan
from shardfn.trainer import Trainer

__all__ = [
    "MeshSpec",
    "Params",
    "Plan",
    "Policy",
    "Report",
    "ShardError",
    "Trainer",
    "apply",
    "check",
    "checkpoint",
    "collectives",
    "cross_entropy",
    "data",
    "gather",
    "grad",
    "hvp",
    "jit",
    "jvp",
    "make_mesh",
    "optim",
    "plan",
    "policies",
    "reduce_grads",
    "register",
    "reshard",
    "shard",
    "shard_map",
    "simulate",
    "tree",
    "typeof",
    "value_and_grad",
    "visualize",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> _ModuleType:
    """`sf.testing` is imported when it is first used: programs that train do not need it."""
    if name == "testing":
        return _import_module("shardfn.testing")
    raise AttributeError(f"module 'shardfn' has no attribute '{name}'")
