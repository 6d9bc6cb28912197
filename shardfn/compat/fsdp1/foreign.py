"""What torch's own FSDP1 writes: `ShardedTensor`s, and flat parameters of its LOCAL_STATE_DICT. Layer 6.

A flat parameter is all parameters of one instance, end to end in the order of its modules; with `use_orig_params` each
begins at a multiple of 16 bytes.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardfn.compat.fsdp1.instance import instances
from shardfn.compat.loading import whole_of
from shardfn.compat.sharded import own_modules
from shardfn.core.errors import ShardError

FLAT = "_flat_param"
_ALIGNED = 16  # bytes


def without_flat_parameters(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with whole tensors under the model's names in the place of flat parameters.

    Raises:
        ShardError: a flat parameter of an instance that the model does not have, or of another size.
    """
    found = dict(state)
    prefixes = {f"{name}." if name else "": inside for name, inside, _ in instances(module)}
    for key in [key for key in state if key.rpartition(".")[2] == FLAT]:
        prefix = key.removesuffix(FLAT)
        if prefix not in prefixes:
            raise ShardError(f"load_state_dict: {key!r} is of an instance that this model does not have; wrap it alike")
        flat = whole_of(found.pop(key))
        found |= {prefix + name: part for name, part in _unflattened(key, flat, prefixes[prefix]).items()}
    return found


def _unflattened(key: str, flat: Tensor, module: nn.Module) -> dict[str, Tensor]:
    own: dict[int, tuple[str, Tensor]] = {}
    for path, inside in own_modules(module):
        for name, parameter in inside.named_parameters(recurse=False):
            own.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    sizes = [parameter.numel() for _, parameter in own.values()]
    step = 1 if sum(sizes) == flat.numel() else max(1, _ALIGNED // flat.element_size())
    found: dict[str, Tensor] = {}
    start = 0
    for name, parameter in own.values():
        start = -(-start // step) * step
        found[name] = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    if start > flat.numel():
        raise ShardError(f"load_state_dict: {key!r} has {flat.numel()} elements, this model's instance has {start}")
    return found
