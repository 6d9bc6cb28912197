"""FSDP2's whole surface, one case a row: each runs on ranks and checks what a script that uses the row relies on.

A row is one argument of `fully_shard`, method of `FSDPModule`, function beside them, or function, argument and option
of torch's state dict functions, which work on our models as they are. The oracle is one plain process, or torch's own
`fully_shard` on the same model. Known differences: docs/howto/from-fsdp2.md. The rows are in `fsdp2_rows/`.
"""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from fsdp2_rows import arguments, functions, methods, state_dicts
from fsdp2_rows.common import TABLE
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import _fully_shard as theirs

from shardfn.compat import fsdp2
from shardfn.testing import RankError, run

SECTIONS = (arguments, methods, functions, state_dicts)  # importing them enters their rows


@pytest.mark.sample(90)
@pytest.mark.parametrize("key", list(TABLE.rows))
def test_row(key: str) -> None:
    """Rows of 4.2 run torch's own functional collectives, in which processes of torch 2.13 were seen to die on gloo.

    See `comm/buckets.py`; ours do without them, torch's state dict functions do not.
    """
    row = TABLE.rows[key]
    try:
        run(row.case, ranks=row.ranks)
    except RankError as error:
        if row.section != "4.2" or "was killed by SIG" not in str(error):
            raise
        run(row.case, ranks=row.ranks)


def test_every_argument_of_fully_shard_has_a_row() -> None:
    listed = TABLE.names("4.1")
    assert [name for name in inspect.signature(torch_fsdp.fully_shard).parameters if name not in listed] == []
    policy = [each.name for each in fields(torch_fsdp.MixedPrecisionPolicy)]
    assert [name for name in policy if name not in listed] == []


def test_every_method_of_torchs_module_has_a_row_and_is_ours() -> None:
    listed = TABLE.names("4.1 methods").split()
    methods = [name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")]
    methods += ["_set_unshard_async_op", "_get_fsdp_state"]
    assert [name for name in sorted(methods) if name not in listed] == []
    both = (fsdp2.FSDPModule, torch_fsdp.FSDPModule)
    assert [name for name in methods if _parameters(both[0], name) != _parameters(both[1], name)] == []


def _parameters(cls: type, name: str) -> list[Any]:
    """Name, kind and default of the parameters of a method."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(getattr(cls, name)).parameters.values()]


def test_every_name_of_torchs_package_is_ours() -> None:
    public = set(theirs.__all__)
    assert [name for name in sorted(public) if not hasattr(fsdp2, name)] == []


def test_every_function_and_option_of_state_dicts_has_a_row() -> None:
    listed = TABLE.names("4.2")
    options = [each.name for each in fields(dsd.StateDictOptions)]
    functions = [name for name in dsd.__all__ if name.startswith(("get_", "set_"))]
    assert [name for name in options + functions if name not in listed] == []
    arguments = {argument for name in functions for argument in inspect.signature(getattr(dsd, name)).parameters}
    assert [name for name in sorted(arguments - {"model", "options"}) if name not in listed] == []


def test_no_row_is_missing(record_property: Any) -> None:
    record_property("rows", f"FSDP2: {TABLE.counts}")
    assert TABLE.counts_said_in("howto/from-fsdp2.md") == TABLE.counts
    assert not TABLE.missing
