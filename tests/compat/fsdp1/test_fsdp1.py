"""FSDP1's class in models that have bitten somebody, against one process."""

import copy
import pickle
import warnings
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Stack
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardfn as sf
from shardfn.comm import buckets
from shardfn.compat.fsdp1 import FullyShardedDataParallel as FSDP
from shardfn.compat.hfai import FullyShardedDataParallel as HFAI
from shardfn.testing import assert_close, run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Nested(nn.Module):
    """Children with the names of properties that the class has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.module = nn.Linear(5, 5)
        self.rank = Block()
        self.norm = nn.BatchNorm1d(5)
        self.training_state = nn.BatchNorm1d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.training_state(self.norm(self.rank(self.module(x @ self.weight))))


def _net() -> nn.Module:
    return Stack(nn.Linear(5, 5), Block(), Block())


def _pair(cls: Any, policy: Any = None, **given: Any) -> tuple[Any, Any]:
    """A wrapped model, and the same model."""
    torch.manual_seed(0)
    model = cls().double()
    plain = copy.deepcopy(model)
    return FSDP(model, auto_wrap_policy=policy, **given), plain


def _batch() -> tuple[Tensor, Tensor]:
    """This rank's part, and the whole."""
    x = torch.randn(4 * dist.get_world_size(), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.chunk(dist.get_world_size())[dist.get_rank()], x


def _at(model: Any, name: str) -> Any:
    return dict(model.named_parameters())[name]


def _children_named_like_properties() -> None:
    for policy in (None, ModuleWrapPolicy({Block})):
        model, plain = _pair(Nested, policy)
        model.eval()
        plain.eval()
        x, whole = _batch()
        model(x).square().mean().backward()
        plain(whole).square().mean().backward()
        for name, parameter in plain.named_parameters():
            assert_close(buckets.whole(_at(model, name).grad), parameter.grad, rtol=1e-10, atol=1e-12)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert model.module is not model and isinstance(model.module, Nested)


def test_children_may_have_the_names_of_properties() -> None:
    run(_children_named_like_properties, ranks=2)


def _changes_inside_summon() -> None:
    model, plain = _pair(_net, ModuleWrapPolicy({Block}))
    x, _ = _batch()
    for recurse in (True, False):
        with FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
            model.emb.weight.mul_(2)
            changed = copy.deepcopy(plain)
            changed.emb.weight.mul_(2)
            assert_close(model(x), changed(x), rtol=1e-10, atol=1e-12)
        assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)
    with FSDP.summon_full_params(model):
        model.emb.weight = nn.Parameter(torch.ones(5, 5, dtype=torch.float64))
    assert bool(model.state_dict()["emb.weight"].eq(1).all())
    with pytest.raises(sf.ShardError, match=r"'emb.weight' was replaced by \(2, 5\) while it was whole"):
        with FSDP.summon_full_params(model):
            model.emb.weight = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises(sf.ShardError, match=r"got a gradient within it, .*; call loss\.backward\(\) outside"):
        with FSDP.summon_full_params(model):
            model(x).sum().backward()
    assert bool(model.state_dict()["emb.weight"].eq(1).all())


def test_what_changes_inside_summon_is_what_a_forward_there_sees() -> None:
    run(_changes_inside_summon, ranks=2)


def _loads_with_hooks() -> None:
    model, plain = _pair(_net)

    def rename(state: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state if "gamma" in key]:
            state[key.replace("gamma", "weight")] = state.pop(key)

    model.emb._register_load_state_dict_pre_hook(rename)
    old = {key.replace("emb.weight", "emb.gamma"): 2 * value for key, value in plain.state_dict().items()}
    model.load_state_dict(old)
    assert_close(model.state_dict()["emb.weight"], old["emb.gamma"], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"size mismatch for emb.weight"):
        model.load_state_dict({**old, "emb.gamma": torch.ones(2, 2)})
    assert_close(model.state_dict()["layers.0.fc.weight"], old["layers.0.fc.weight"], rtol=0, atol=0)


def test_hooks_that_rename_work_when_a_state_dict_is_loaded() -> None:
    run(_loads_with_hooks, ranks=2)


def _decides_when_the_gradient_comes() -> None:
    model, plain = _pair(_net, ModuleWrapPolicy({Block}))
    x, whole = _batch()
    with model.no_sync():
        loss = model(x).square().mean()
    loss.backward()
    plain(whole).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert_close(buckets.whole(_at(model, name).grad), parameter.grad, rtol=1e-10, atol=1e-12)
    with model.no_sync():
        model(x).square().mean().backward()
        with pytest.raises(sf.ShardError, match="never reduced"):
            model.clip_grad_norm_(1.0)


def test_a_backward_outside_of_no_sync_reduces() -> None:
    run(_decides_when_the_gradient_comes, ranks=2)


def _checkpointed() -> None:
    for outside in (True, False):
        torch.manual_seed(0)
        model: Any = _net().double()
        plain = copy.deepcopy(model)
        wrapper = partial(checkpoint_wrapper, preserve_rng_state=False)
        if not outside:
            apply_activation_checkpointing(model, wrapper, check_fn=lambda m: isinstance(m, Block))
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        if outside:
            apply_activation_checkpointing(model, wrapper, check_fn=lambda m: isinstance(m, Block))
        x, whole = _batch()
        for _ in range(2):
            model(x).square().mean().backward()
            plain(whole).square().mean().backward()
        assert list(model.state_dict()) == list(plain.state_dict())
        for name, parameter in plain.named_parameters():
            own = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
            assert_close(buckets.whole(own[name].grad), parameter.grad, rtol=1e-10, atol=1e-12)


def test_activation_checkpointing_around_and_inside_of_units() -> None:
    run(_checkpointed, ranks=2)


def _keeps_a_reference() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)
            self.kept = [self.fc.weight]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.fc(x), self.kept[0])

    with pytest.raises(sf.ShardError, match=r"computes with 'fc.weight' of the model as it was before it was sharded"):
        FSDP(Keeps())(torch.ones(2, 5))


def test_a_parameter_in_a_list_is_refused() -> None:
    run(_keeps_a_reference, ranks=2)


def _compiles() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, plain = _pair(_net, ModuleWrapPolicy({Block}))
        compiled: Any = torch.compile(model, backend=backend)
        x, whole = _batch()
        for _ in range(2):
            compiled(x).square().mean().backward()
            plain(whole).square().mean().backward()
    assert len(graphs) == 1, "both blocks share one graph"
    for name, parameter in plain.named_parameters():
        assert_close(buckets.whole(_at(model, name).grad), parameter.grad, rtol=1e-10, atol=1e-12)


def test_torch_compile_makes_a_graph_of_every_unit() -> None:
    run(_compiles, ranks=2)


def _writes_in_place() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.ones(6, 5))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.codes.mul_(0.5)
            return x @ self.codes.T

    model = FSDP(Codebook())
    with pytest.raises(RuntimeError, match=r"'codes' was changed in place by the forward, .* the change is lost"):
        model(torch.ones(2, 5))
    assert bool(model.state_dict()["codes"].eq(1).all())
    limited = FSDP(nn.Sequential(nn.Embedding(6, 4, max_norm=0.1)))
    with pytest.raises(RuntimeError, match=r"'0\.weight' was changed in place"):
        limited(torch.arange(6))


def test_a_parameter_written_by_a_forward_is_an_error() -> None:
    run(_writes_in_place, ranks=2)


def _in_another_dtype() -> None:
    fsdp, plain = _pair(_net, ModuleWrapPolicy({Block}))
    mine, _ = _batch()
    fsdp(mine)
    fsdp.float()
    assert_close(fsdp(mine.float()), plain.float()(mine.float()))
    fsdp.double()
    fsdp(mine).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in fsdp.parameters())


def test_shards_in_another_dtype_are_shards_still() -> None:
    """`module.to()` swaps DTensors for new ones."""
    run(_in_another_dtype, ranks=2)


class Shared(nn.Module):
    """One layer in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _in_three_places() -> None:
    fsdp, plain = _pair(Shared, ModuleWrapPolicy({Block}))
    mine, whole = _batch()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (fsdp, plain)]
    for each, x, optimizer in zip((fsdp, plain), (mine, whole), optimizers, strict=True):
        each(x).square().mean().backward()
        optimizer.step()
    assert_close(fsdp.state_dict()["layers.0.fc.weight"], plain.layers[0].fc.weight.detach())


def test_a_layer_in_three_places_under_a_policy() -> None:
    run(_in_three_places, ranks=2)


def _wrapped_wrongly() -> None:
    tied: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    tied[0] = FSDP(tied[0])
    with pytest.raises(sf.ShardError, match=r"'1\.weight' is tied to 'weight' of one wrapped before"):
        FSDP(tied)
    fsdp = FSDP(nn.Linear(4, 4))
    with pytest.raises(sf.ShardError, match="this module is wrapped already"):
        FSDP(fsdp)
    with pytest.raises(pickle.PicklingError, match="Save state_dict"):
        pickle.dumps(fsdp)


def test_what_cannot_be_wrapped_or_pickled() -> None:
    run(_wrapped_wrongly, ranks=2)


def _state_of_another_rank(folder: Path) -> None:
    """What rank 0 alone saved, and every rank loads."""
    torch.manual_seed(0)
    fsdp = FSDP(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(fsdp.parameters())
    for _ in range(2):
        fsdp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), folder / str(dist.get_rank()))
    dist.barrier()
    optimizer.load_state_dict(torch.load(folder / str(dist.get_rank()), weights_only=False))
    optimizer.step()
    optimizer.step()
    optimizer.load_state_dict(torch.load(folder / "0", weights_only=False))
    words = (
        "'exp_avg' of a parameter is the part of rank 0" if dist.get_rank() else "1 of 2 ranks have loaded the state"
    )
    with pytest.raises(sf.ShardError, match=words):
        optimizer.step()


def test_the_optimizer_state_of_another_rank(tmp_path: Path) -> None:
    run(_state_of_another_rank, tmp_path, ranks=2)


class Flagged(nn.Module):
    """Attributes of its class that the module has, too."""

    tag, flag, _units = "class", False, ()

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.tag, self._units = "own", ("Block",)

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        self._size = value

    @cached_property
    def cached(self) -> object:
        return object()

    def greet(self) -> str:
        return f"{type(self).__name__}: {self.tag}"

    def forward(self, x: Tensor) -> Tensor:
        self.tag = f"{self.tag} seen"
        return self.fc(2 * x if self.flag else x)


class Adapted(nn.Module):
    """Looks elsewhere for what it has not, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Flagged()
        self.tag = "adapted"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _own_attributes_come_first(cls: Any) -> None:
    model: Any = Stack(Adapted(), Flagged(), Flagged()).double()
    plain: Any = Stack(Adapted(), Flagged(), Flagged()).double()
    plain.load_state_dict(model.state_dict())
    fsdp: Any = cls(model, auto_wrap_policy=ModuleWrapPolicy({Adapted, Flagged}))
    first: Any = fsdp.emb
    assert (first.tag, first.inner.tag, type(first.inner).tag, first._units) == ("adapted", "own", "class", ("Block",))
    first.inner.flag = plain.emb.inner.flag = True
    x = torch.ones(2, 5, dtype=torch.float64)
    for each in (fsdp, plain):
        each(x).square().mean().backward()
    assert first.inner.flag and first.inner.tag == plain.emb.inner.tag == "own seen"
    assert_close(buckets.whole(_at(fsdp, "emb.inner.fc.weight").grad), plain.emb.inner.fc.weight.grad)
    unit: Any = fsdp.layers[0]
    unit.size = 3
    assert unit.size == unit.module.size == 3 and unit.cached is unit.cached is unit.module.cached
    assert unit.greet() == f"{cls.__name__}: own seen"  # methods of the class are bound to what stands before
    unit.module.greet = lambda: "patched"
    assert unit.greet() == copy.deepcopy(unit).greet() == "patched" != fsdp.layers[1].greet()
    assert not fsdp.layers[1].flag
    del unit.tag
    assert unit.tag == "class"
    unit.module.train = lambda mode=True: seen.append(mode)
    fsdp.state_dict = lambda: "patched"
    seen: list[bool] = []
    fsdp.eval()
    assert seen == [False] and fsdp.state_dict() == "patched" and "state_dict" not in vars(model)


@pytest.mark.parametrize("cls", [FSDP, HFAI])
def test_what_the_module_itself_has_comes_before_what_its_class_has(cls: Any) -> None:
    run(_own_attributes_come_first, cls, ranks=2)
