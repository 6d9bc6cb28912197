"""Section 1.8. Private names that scripts touch."""

import pytest
import torch
from torch import nn

from fsdp1_rows.common import FULL, LOCAL, Block, Net, batch, flavour, mine, row, wrapped
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.fsdp1._runtime_utils import _lazy_init


@row("1.8", "_fsdp_wrapped_module")
def has_the_wrapped_module() -> None:
    """A property; replacing it in names does nothing."""
    model = Net()
    fsdp = wrapped(model)
    assert fsdp._fsdp_wrapped_module is model and isinstance(fsdp.layers[0]._fsdp_wrapped_module, Block)
    names = [n.replace("_fsdp_wrapped_module.", "") for n, _ in fsdp.named_parameters()]
    assert names == [n for n, _ in Net().named_parameters()]


@row("1.8", "_handles, flat_param, _flat_param", "refused")
def refuses_flat_parameters() -> None:
    """AttributeError that names what to use instead; `hasattr` is False."""
    fsdp = wrapped()
    assert fsdp._handle is None and fsdp.layers[0]._handle is None  # scripts skip such instances
    for name in ("_handles", "flat_param", "_flat_param", "_all_handles"):
        assert not hasattr(fsdp, name)
        with pytest.raises(AttributeError, match="summon_full_params"):
            getattr(fsdp.layers[0], name)


@row("1.8", "_lazy_init")
def initialises_lazily() -> None:
    """Makes a module the root now."""
    fsdp = wrapped()
    assert fsdp._is_root is None
    assert _lazy_init(fsdp, fsdp) is fsdp
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False


@row("1.8", "_is_root")
def tells_the_root() -> None:
    """None before the first forward, then whether it is; it can be set."""
    fsdp = wrapped()
    assert fsdp._is_root is None
    fsdp(mine(batch()))
    assert fsdp._is_root is True and fsdp.layers[0]._is_root is False
    fsdp._is_root = None
    assert fsdp._is_root is None
    fsdp(mine(batch()))
    assert fsdp._is_root is True


@row("1.8", "_state_dict_type")
def tells_the_state_dict_type() -> None:
    """The flavour now."""
    fsdp = wrapped()
    assert fsdp._state_dict_type is FULL
    with flavour(fsdp, LOCAL):
        assert fsdp._state_dict_type is LOCAL and fsdp.layers[0]._state_dict_type is LOCAL


@row("1.8", "_use_orig_params")
def tells_use_orig_params() -> None:
    """As it was given."""
    assert wrapped()._use_orig_params is False and wrapped(use_orig_params=True).layers[0]._use_orig_params is True


@row("1.8", "compute_device")
def tells_the_device() -> None:
    """Where it computes."""
    assert wrapped(device_id=torch.device("cpu")).compute_device == torch.device("cpu")


@row("1.8", "_has_params")
def tells_whether_it_has_parameters() -> None:
    """Whether there are any of its own unit."""
    fsdp = wrapped(nn.Sequential(Block()))
    assert fsdp[0]._has_params is True and FSDP(nn.ReLU())._has_params is False
    assert fsdp._has_params is False
    assert fsdp.params == [] and list(map(id, fsdp[0].params)) == list(map(id, fsdp[0].parameters()))
