"""`plan`: what a policy means for a model on a mesh, and with an example of inputs also for its forward."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.layout import MeshSpec, Plan, Policy, class_of, planning
from shardfn.trace.shape_trace import ShapeTrace


def plan(
    model: nn.Module | Mapping[str, Tensor], mesh: DeviceMesh | MeshSpec, policy: Policy, *, example: Any = None
) -> Plan:
    """What `policy` means for `model` on `mesh`; needs no process group, and the model may be on the meta device.

        >>> import shardfn as sf
        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
        >>> megatron = sf.Policy(rules={"0.weight": "ff@tp c@fsdp", "1.weight": "c@fsdp ff@tp"})
        >>> p = sf.plan(model, sf.MeshSpec(fsdp=16, tp=4), megatron, example=torch.empty(8, 64))
        >>> p.bytes_per_rank, p.comm_bytes
        (2080, 96672)

    Args:
        model: a module, or a mapping of names to tensors.
        mesh: a `DeviceMesh` with axis names, or a `MeshSpec`.
        policy: rules, units, precision.
        example: one data rank's inputs: one value, a tuple of several, a dict by the forward's own names
            (`{"input_ids": ids}`), or `((ids,), {"labels": ids})`. The forward then runs once on meta tensors of local
            shape, and `comm_bytes` counts activations too. Without it a head count taken from the configuration, or a
            layer that no rule splits, is only found by the first `apply`.

    Returns:
        plain data; `print` shows it as a table.

    Raises:
        ShardError: listing every problem at once: unknown axes, rules that match nothing, dims that do not divide,
            sizes that clash, modules that cannot compute with split parameters; with `example` also the module whose
            forward does not fit the local sizes.
        TypeError: `model`, `mesh` or `policy` is something else.
        ValueError: the mesh has no axis names.
    """
    planned = planning.plan(model, mesh, policy)
    if example is None:
        return planned
    if not isinstance(model, nn.Module):
        raise TypeError("plan: an example needs the nn.Module, not a mapping of tensors")
    calls = [("", *_arguments(model, example))]
    trial = ShapeTrace(model, planned, MeshSpec(**planned.axes), dict(model.named_buffers()), "__call__", calls)
    return replace(planned, activation_bytes=trial.bytes_moved[trial.adjustments()])


def _arguments(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments; a dict is taken for the latter when the forward has parameters of its names."""
    values: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    args, named = values if len(values) == 2 and isinstance(values[0], tuple) else ((), example)
    if isinstance(named, Mapping):
        with suppress(TypeError):
            inspect.signature(class_of(model).forward).bind(model, *args, **named)
            return args, dict(named)
    return values, {}
