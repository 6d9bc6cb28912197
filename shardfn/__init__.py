"""shardfn: training models that do not fit one device, in the style of JAX, on PyTorch's own parts. Layer 7."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from shardfn import checkpoint as checkpoint
from shardfn import collectives as collectives
from shardfn import data as data
from shardfn import optim as optim
from shardfn import policies as policies
from shardfn import tree as tree
from shardfn.core.apply import apply as apply
from shardfn.core.check import Report as Report
from shardfn.core.check import check as check
from shardfn.core.derivatives import hvp as hvp
from shardfn.core.derivatives import jvp as jvp
from shardfn.core.derivatives import vjp as vjp
from shardfn.core.errors import ShardError as ShardError
from shardfn.core.functional import gather as gather
from shardfn.core.functional import reduce_grads as reduce_grads
from shardfn.core.functional import reshard as reshard
from shardfn.core.functional import shard as shard
from shardfn.core.inspect import typeof as typeof
from shardfn.core.inspect import visualize as visualize
from shardfn.core.jit import jit as jit
from shardfn.core.loss import cross_entropy as cross_entropy
from shardfn.core.mesh import MeshSpec as MeshSpec
from shardfn.core.mesh import make_mesh as make_mesh
from shardfn.core.model import register as register
from shardfn.core.plan import Plan as Plan
from shardfn.core.policy import Policy as Policy
from shardfn.core.shard_map import shard_map as shard_map
from shardfn.core.simulation import simulate as simulate
from shardfn.core.transforms import grad as grad
from shardfn.core.transforms import value_and_grad as value_and_grad
from shardfn.core.tree import Params as Params
from shardfn.core.trial import plan as plan
from shardfn.core.vmap import vmap as vmap
from shardfn.trainer import Trainer as Trainer

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
