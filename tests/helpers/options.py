"""The combinations of `StateDictOptions` that torch serves."""

import itertools

FLAGS = (
    "full_state_dict",
    "cpu_offload",
    "ignore_frozen_params",
    "broadcast_from_rank0",
    "flatten_optimizer_state_dict",
)
NONE = dict.fromkeys(FLAGS, False)


def combinations() -> list[dict[str, bool]]:
    """Every one that torch serves: `broadcast_from_rank0` is for whole state dicts, flat ones are sharded.

    A whole and flat optimizer state cannot be loaded, of any model: torch 2.13 has a KeyError for its own.
    """
    found: list[dict[str, bool]]
    found = [dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=len(FLAGS))]
    refused = "broadcast_from_rank0", "flatten_optimizer_state_dict"
    return [flags for flags in found if not flags[refused[flags["full_state_dict"]]]]


def named(flags: dict[str, bool]) -> str:
    """The options that are on."""
    return "-".join(name for name, on in flags.items() if on) or "none"
