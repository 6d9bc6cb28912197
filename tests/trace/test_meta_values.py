"""What a shape-only trace knows of values: integers, what is made of them, lists and masks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import assert_close, assert_trees_close, on_meshes
from shardfn.trace.function_mode import PairedFunctionMode
from shardfn.trace.interpreter import Interpreter
from shardfn.trace.meta_values import MetaValues, to_meta


def _run() -> tuple[Interpreter, Tensor]:
    """A run, and integers without data that it knows."""
    run = Interpreter({})
    return run, to_meta(torch.tensor([3, 1, 2]), run.values)


def test_integers_become_lists_and_lists_become_integers() -> None:
    run, x = _run()
    with run.sides.run(), run, PairedFunctionMode(run):
        assert (2 * x).tolist() == [6, 2, 4]
        assert torch.tensor([4, 5], device="meta").add(1).tolist() == [5, 6]
        assert len(torch.repeat_interleave(x)) == 6
        assert x.unique_consecutive().tolist() == [3, 1, 2]


def test_numbers_made_of_integers_are_known() -> None:
    run, x = _run()
    with run:
        weights = x.double() / x.sum()
        assert float(weights[0]) == 0.5
        assert len((weights > 0.4).nonzero()) == 1


def test_rows_are_picked_by_a_known_mask() -> None:
    run, x = _run()
    hidden = torch.empty(3, 5, device="meta")
    with run:
        assert hidden[x > 1].shape == (2, 5)
        hidden[x > 1] = 0.0
        hidden[x > 1] += hidden[x > 1]


def test_what_is_drawn_is_not_known_and_draws_nothing() -> None:
    run, x = _run()
    before = torch.get_rng_state()
    with run:
        drawn = torch.bernoulli(x.double() / 3)
    assert torch.equal(before, torch.get_rng_state())
    assert run.values.as_list(drawn) is None


def test_what_fails_with_values_is_done_without() -> None:
    """Not every operation takes integers of the CPU."""
    values = MetaValues()
    x = to_meta(torch.tensor([3, 1], dtype=torch.int32), values)
    out = values.run(torch.ops.aten.histc.default, (x, 4), {})
    assert out.shape == (4,) and values.as_list(out) is None


class Ragged(torch.nn.Module):
    """Asks its inputs which rows there are, and how they fall into sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        y = self.down(self.up(x[mask]).tanh())
        return torch.cat([part.mean(0, keepdim=True) for part in y.split(lengths.tolist())])


def test_a_forward_that_reads_integers_is_planned() -> None:
    policy = sf.Policy(rules={"up.weight": "f@tp c", "down.weight": "c f@tp"})
    example = (torch.empty(4, 8), torch.tensor([True, False, True, True]), torch.tensor([1, 2]))
    assert sf.plan(Ragged(), sf.MeshSpec(fsdp=1, tp=2), policy, example=example).comm_bytes > 0


class _OwnTensors(nn.Module):
    """Makes tensors without naming a device, as CPU scripts do, and keeps one that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(16, 8), nn.Embedding(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = torch.linspace(1, 2, 8)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = (self.emb(ids) + self.pos(torch.arange(ids.shape[1]))) * self.scale
        keep = torch.arange(ids.shape[1])[None] < lengths[:, None]
        if not keep.all():
            x = x * keep[..., None]
        causal = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        h = (x @ x.mT).masked_fill(~causal, -1e9).softmax(-1) @ self.up(x).sin()
        return self.down(torch.zeros(h.shape) + h)


RULES = {"up.weight": "f@tp c", "up.bias": "f@tp", "down.weight": "c f@tp"}


@on_meshes({"tp": 2})
def test_tensors_that_a_forward_makes_without_a_device(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = _OwnTensors()
    ids, lengths = torch.randint(16, (2, 4)), torch.tensor([4, 2])
    expected = model(ids, lengths)
    expected.square().mean().backward()
    params = sf.shard(model, mesh, sf.Policy(rules=RULES))
    _, grads = sf.value_and_grad(lambda p: sf.apply(model, p, ids, lengths).square().mean())(params)
    assert_close(sf.apply(model, params, ids, lengths), expected)
    assert_trees_close(sf.gather(grads), {name: p.grad for name, p in model.named_parameters()})


def _written(h: Tensor) -> Tensor:
    out = torch.zeros(4, 8)
    out[:2] = h[:2]
    return out


def _given_to_write(h: Tensor) -> Tensor:
    out = torch.zeros(4, 8)
    with torch.no_grad():
        torch.mul(h, 2, out=out)
    return out


@pytest.mark.parametrize("written", [_written, _given_to_write])
def test_what_is_written_into_a_tensor_with_data_is_refused(written: Callable[[Tensor], Tensor]) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return written(self.down(self.up(x))) + 0 * x

    with torch.device("meta"):
        model = Writes()
    with pytest.raises(sf.ShardError, match=r"must follow x\.device"):
        sf.plan(model, sf.MeshSpec(tp=2), sf.Policy(rules=RULES), example=torch.empty(4, 8))


def test_a_tensor_with_data_counts_as_it_is_where_it_meets_others() -> None:
    run, x = _run()
    own = torch.tensor([1, 0, 2])
    with run.sides.run(), run, PairedFunctionMode(run):
        assert (x + own).tolist() == [4, 1, 4]
        own.add_(1)
        assert (x + own).tolist() == [5, 2, 5]


def test_a_tensor_on_the_cpu_meets_no_other_of_another_device() -> None:
    run = Interpreter({}, on_cpu=False)
    with run.sides.run(), run, PairedFunctionMode(run), pytest.raises(RuntimeError, match="device"):
        _ = torch.empty(3, device="meta") + torch.ones(3)
