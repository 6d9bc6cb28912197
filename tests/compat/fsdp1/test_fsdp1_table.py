"""FSDP1's whole surface, one case a row: each runs on ranks and checks what a script that uses the row relies on.

A row is one argument, method, config class, policy, observed behaviour, error, import door or private name of torch's
FSDP1 1.11 to 2.13. Known differences: parameters are `nn.Parameter(DTensor)`s under the model's own names instead of
flat pieces, and so are the values of sharded state dicts. The rows are in `fsdp1_rows/`, a module for each section.
"""

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from fsdp1_rows import configs, constructor, doors, errors, methods, observed, policies, private_names
from fsdp1_rows.common import TABLE

from shardfn.testing import run

SECTIONS = (  # importing them enters their rows
    constructor,
    methods,
    configs,
    policies,
    observed,
    errors,
    doors,
    private_names,
)


@pytest.mark.everyday(20)
@pytest.mark.parametrize("key", list(TABLE.rows))
def test_row(key: str) -> None:
    run(TABLE.rows[key].case, ranks=TABLE.rows[key].ranks)


def test_every_argument_method_and_name_of_torch_has_a_row() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel
    listed = {section: TABLE.names(section) for section in ("1.1", "1.2")}
    arguments = set(inspect.signature(theirs.__init__).parameters) - {"self"}
    methods = {name for name in vars(theirs) if not name.startswith("_")} - {"training_state"}
    assert [name for name in sorted(arguments) if name not in listed["1.1"]] == []
    assert [name for name in sorted(methods) if name not in listed["1.2"]] == []


def test_no_row_is_missing(record_property: Any) -> None:
    record_property("rows", f"FSDP1: {TABLE.counts}")
    assert TABLE.counts_said_in("howto/from-fsdp1.md") == TABLE.counts
    assert not TABLE.missing
