"""A sample of `tests/slow/sweep.py`, and the reasons that a refusal may have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_configs
import torch
from families import FAMILIES
from sweep import MESH, REASONS, TOLERANCE, Result, compared, names, reason_of, table
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import run

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "transformers.md"

# Compressed attention with an indexer; masks made of keys; a norm over all heads; experts that the model's plan cuts
# wrongly, and convolutions; linear attention; a tower whose shapes depend on integers; an indexer that
# drops keys by what it has computed.
SAMPLE = ("deepseek_v32", "doge", "esmc", "inkling_text", "kimi_linear", "gemma4_vision", "glm5_next_text")


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_model_type_is_served(model_type: str) -> None:
    for result in run(compared, model_type, MESH):
        assert (result.verdict, result.reason) == ("served", ""), result.detail
        assert result.split > 0.5


def test_linears_of_inner_modules_are_gathered_too() -> None:
    acts = sf.policies.from_transformers(tiny_configs.make("neomme")).acts
    assert acts["layers.*.self_attn.output_projection.gate_proj"] == "... _"


def test_every_model_type_has_a_model_or_a_reason() -> None:
    assert set(names()) | set(tiny_configs.NO_MODEL) == set(tiny_configs.names())
    assert len(names()) > 100


def _wrong(model_type: str) -> Result:
    made = tiny_configs.loss
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiny_configs, "loss", lambda name, out, ids: made(name, out, ids) + ids.sum() * 1e-6)
        return compared(model_type, MESH)


def test_wrong_numbers_are_seen() -> None:
    """A sum over the samples is no mean: it is another number on each data rank."""
    (result, *_) = run(_wrong, "llama")
    assert result.verdict == "wrong" and "loss: off by" in result.detail and 1e-6 > TOLERANCE


class Reads(nn.Module):
    """A forward that goes one way or the other by what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h if h.detach().sum().item() > 0 else -h)


class Mean(Reads):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(-1, keepdim=True))


class Views(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(len(x), 16))


class Shares(Reads):
    """What a collective by hand makes is the same on all ranks, and meets a split value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        total = sf.collectives.psum(h.sum(-1, keepdim=True), sf.MeshSpec(fsdp=1, tp=2), "tp")
        return self.down(h * total)


def _planned(model: nn.Module) -> None:
    rules = sf.Policy(rules={"up.weight": "f@tp c", "down.weight": "c f@tp"}, compile=True)
    sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), rules, example=torch.empty(4, 8))


def _styled() -> None:
    model: Any = FAMILIES["Llama"].make()
    model._tp_plan = {"model.norm": "diagonal"}
    sf.policies.from_transformers(model)


def _divided() -> None:
    model = FAMILIES["Llama"].make()
    sf.plan(model, sf.MeshSpec(fsdp=1, tp=3), sf.policies.from_transformers(model))


REFUSALS: dict[str, Callable[[], None]] = {
    "a style that is not known here": _styled,
    "sizes that do not divide, or clash": _divided,
    "a forward that reads values which depend on weights": lambda: _planned(Reads()),
    "a size that is not taken from the tensors": lambda: _planned(Views()),
    "a part that cannot be told": lambda: _planned(Mean()),
    "a shared value that meets a split one": lambda: _planned(Shares()),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_refusal_has_a_reason_that_is_documented(reason: str) -> None:
    with pytest.raises(sf.ShardError) as refused:
        REFUSALS[reason]()
    assert reason_of(str(refused.value)) == reason
    assert reason in DOCS.read_text(), "docs/howto/transformers.md lists the reasons"


def test_the_table_has_every_model_type_once() -> None:
    results = [
        Result("a", "served", split=0.95),
        Result("b", "served", split=0.2),
        Result("c", "refused", "a part that cannot be told"),
    ]
    text = table(results)
    assert text.startswith("2 served, 1 refused, 0 wrong, 0 crashed")
    assert "| refused: a part that cannot be told: 1 | c |" in text and text.count("| a |") == 1
