"""`simulate`: all ranks of a mesh in this process. Layer 1."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardfn._torch import simulated, simulated_ranks
from shardfn.core.errors import ShardError
from shardfn.core.mesh import MeshSpec, axes_of


@contextmanager
def simulate(**axes: int) -> Iterator[DeviceMesh]:
    """Within it this process is all ranks of a mesh: the real program, in a notebook or a test, without torchrun.

    Tensors made within hold one value for each rank, and every operation is done for each; collectives exchange
    between them. Tensors from outside are the same on all ranks. It is for seeing and testing, not for speed: CPU only,
    one operation after another.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(8, 4)
        >>> with sf.simulate(fsdp=2, tp=2) as mesh:
        ...     params = sf.shard(model, mesh, sf.Policy(rules={"weight": "o@tp c@fsdp"}))
        ...     x = sf.data.local_batch(torch.ones(4, 8), mesh)
        ...     loss, grads = sf.value_and_grad(lambda p, x: sf.apply(model, p, x).sum())(params, x)
        ...     whole = sf.gather(grads)
        >>> whole["bias"].reconcile()
        tensor([2., 2., 2., 2.])

    Args:
        axes: axis name -> size, outermost first.

    Yields:
        the mesh. `sf.data.local_batch` gives each rank its part of a batch. A tensor that is the same on all ranks (a
        loss, what `gather` returns) becomes an ordinary one by `.reconcile()`, `float()` or `.tolist()`.

    Raises:
        ShardError: inside another simulation.
        TypeError: a size is not a whole number, or there is no axis.

    Communication: none between processes.
    """
    sizes = axes_of(MeshSpec(**axes))
    if simulated():
        raise ShardError("simulate: a simulation goes on already")
    with simulated_ranks(prod(sizes.values())):
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
