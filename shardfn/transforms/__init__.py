"""`apply`, and what composes with it: `value_and_grad`, `jvp`, `vjp`, `hvp`, `vmap`, `jit`, `shard_map`.

Read `module_call` (`apply`: run a module with the weights of a tree), `autodiff` (`value_and_grad`), `torch_func`
(`jvp`, `vjp`, `hvp`, `vmap`) with `forward_mode`, `jit`, `shard_map`, and `unsupported_calls` (collectives of others,
refused inside). Not here: optimizers, classes.
"""

from shardfn.transforms import autodiff
from shardfn.transforms.autodiff import grad, value_and_grad
from shardfn.transforms.forward_mode import ByFormulas
from shardfn.transforms.jit import jit
from shardfn.transforms.module_call import apply
from shardfn.transforms.shard_map import shard_map
from shardfn.transforms.torch_func import hvp, jvp, vjp, vmap
