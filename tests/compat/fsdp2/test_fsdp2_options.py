"""`StateDictOptions` in every combination, on and between 1-D, HSDP and tensor-parallel meshes of `fully_shard`."""

import copy
from typing import Any

import pytest
import torch
from fsdp2_rows.common import adamw, first_rank, loss_of, mine, net, sharded, tokens, trained, values
from options import combinations, named
from ranks import folder, quiet
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardfn.testing import assert_trees_close, run


def _frozen(seed: int = 1) -> Any:
    model = net(seed=seed)
    model.blocks[1].requires_grad_(False)
    return model


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def _set(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any, options: StateDictOptions) -> None:
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def _go_on(model: Any, optimizer: torch.optim.Optimizer, kind: str | None) -> None:
    """One more step, of a plain model with the whole batch."""
    optimizer.zero_grad()
    loss_of(model, tokens(7) if kind is None else mine(tokens(7), kind)).backward()
    optimizer.step()


def _round_trip(kind: str, other: str, flags: dict[str, bool]) -> None:
    """What a model saves goes on in one on the same mesh, and, whole or through a directory, in one on another mesh."""
    settings: dict[str, Any] = {**flags, "strict": not flags["ignore_frozen_params"]}
    options, is_full = StateDictOptions(**settings), flags["full_state_dict"]
    saved = sharded(kind, model=_frozen())
    saver = trained(saved, kind)
    state = copy.deepcopy(_state(saved, saver, options))
    if is_full and flags["cpu_offload"] and not first_rank():
        assert state == {"model": {}, "optimizer": {}}
    if is_full and flags["cpu_offload"] and not flags["broadcast_from_rank0"]:
        return  # only the first rank has something to load: that is for files
    plain = _frozen()
    own = trained(plain)
    _go_on(plain, own, None)
    for to in (kind, other):
        loaded = sharded(to, model=_frozen(2))
        loader = adamw(loaded)
        own_state = copy.deepcopy(state)
        if to == other and not is_full:
            with folder() as at, quiet():
                state_dict_saver.save(state, checkpoint_id=at)
                own_state = _state(loaded, loader, options)
                state_dict_loader.load(own_state, checkpoint_id=at)
        _set(loaded, loader, own_state, options)
        if flags["ignore_frozen_params"]:
            whole = StateDictOptions(full_state_dict=True)
            set_model_state_dict(loaded, get_model_state_dict(saved, options=whole), options=whole)
        _go_on(loaded, loader, to)
        assert_trees_close(values(loaded), values(plain), rtol=0, atol=1e-9)


KINDS = ("plain", "hybrid", "tensor")


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("flags", "number"), [pytest.param(flags, number, id=named(flags)) for number, flags in enumerate(combinations())]
)
def test_every_combination(flags: dict[str, bool], number: int) -> None:
    kind, other = KINDS[number % 3], KINDS[(number + 1) % 3]  # and the other way round, somewhere
    run(_round_trip, kind, other, flags, ranks=4)
