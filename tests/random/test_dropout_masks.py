"""Dropout by sample: the same masks on every mesh, under every transform, again when computed again; and refusals."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn._torch import pytree
from shardfn.random import dropout_masks as masks_of
from shardfn.testing import assert_parity, on_meshes

MESHES = tuple({"fsdp": f, "tp": t} for f, t in ((4, 1), (2, 2), (1, 4)))
SEED = 7


class Block(nn.Module):
    """Drops scores of heads, features of a hidden layer, and, with one module twice, what is whole."""

    def __init__(self, checkpoints: str) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop_scores, self.drop_hidden, self.drop = nn.Dropout(0.3), nn.Dropout(0.4), nn.Dropout(0.2)
        self.checkpoints = checkpoints

    def attend(self, x: Tensor) -> Tensor:
        """[b, s, c] -> the same."""
        q = rearrange(self.q(x), "b s (h d) -> b h s d", d=4)
        scores = self.drop_scores((q @ q.transpose(-1, -2)).softmax(-1))
        return self.drop(self.o(rearrange(scores @ q, "b h s d -> b s (h d)")))

    def forward(self, x: Tensor) -> Tensor:
        again = "method" in self.checkpoints
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if again else self.attend(x))
        return x + self.drop(self.down(self.drop_hidden(torch.tanh(self.up(x)))))


class Model(nn.Module):
    def __init__(self, checkpoints: str, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(blocks))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "block" in self.checkpoints else block(x)
        return x


RULES = {
    "blocks.*.q.weight": "(h@tp d) c@fsdp",
    "blocks.*.o.weight": "c@fsdp (h@tp d)",
    "blocks.*.up.weight": "ff@tp c@fsdp",
    "blocks.*.down.weight": "c@fsdp ff@tp",
}


def _model(checkpoints: str = "", blocks: int = 2) -> Model:
    torch.manual_seed(1)
    return Model(checkpoints, blocks).double()


def _policy(**fields: Any) -> sf.Policy:
    return sf.Policy(rules=RULES, sizes={"d": 4}, **fields)


def _batch() -> Tensor:
    return torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _loss(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x: sf.apply(model, p, x if x.dim() == 3 else x[None]).square().mean()


def _value_and_grad(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    loss, grads = sf.value_and_grad(_loss(model))(p, x)
    return loss, sf.gather(grads)


def _torch_grad(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    return sf.gather(torch.func.grad(_loss(model))(p, x))


def _per_sample(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    return sf.gather(sf.vmap(sf.grad(_loss(model)), in_dims=(None, 0))(p, x))


def _closed_over(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    """Samples of a rank's part of the batch, with a tree that is not mapped."""
    return sf.gather(sf.grad(lambda p: sf.vmap(lambda x: _loss(model)(p, x))(x).mean())(p))


def _hvp(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    return sf.gather(sf.hvp(_loss(model), (p, x), sf.tree.map(torch.ones_like, p)))


def _slope(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    value, slope = sf.jvp(lambda p: _loss(model)(p, x), (p,), (sf.tree.map(torch.ones_like, p),))
    mesh = p.mesh
    return [sf.collectives.pmean(part, mesh, "fsdp") for part in (value, slope)]


def _twice(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    loss, grads = sf.value_and_grad(lambda p: _loss(model)(p, x) + 2 * _loss(model)(p, x))(p)
    return loss, sf.gather(grads)


def _members(model: nn.Module, p: sf.Params, x: Tensor) -> Any:
    """Gradients of two members, stacked by hand, so that each lies on all ranks."""
    stacked = sf.tree.map(lambda a: torch.stack([a, 2 * a]), p)
    found = sf.gather(sf.vmap(sf.grad(_loss(model)), in_dims=(0, None))(stacked, x))
    return {name: g.mean(0) for name, g in found.items()}


def _at_one(value: Any) -> Any:
    return pytree.tree_map(lambda x: x.reconcile() if hasattr(x, "reconcile") else x, value)


def _require_like_one_rank(mesh: DeviceMesh, program: Callable[..., Any], checkpoints: str = "", **fields: Any) -> None:
    model, x = _model(checkpoints), _batch()
    torch.manual_seed(torch.distributed.get_rank())  # a generator of its own on every rank, and it does not matter

    def result(mesh: DeviceMesh) -> Any:
        params = sf.shard(model, mesh, _policy(**fields))
        with sf.data.dropout_seed(SEED, torch.tensor(2)):
            return program(model, params, sf.data.local_batch(x, mesh))

    found = result(mesh)
    if torch.distributed.get_rank() == 0:
        with sf.simulate(fsdp=1, tp=1) as one:
            wanted = _at_one(result(one))
        assert_parity(found, wanted, tol=1e-10)
    without = sf.gather(sf.grad(_loss(_model().eval()))(sf.shard(model, mesh, _policy()), sf.data.local_batch(x, mesh)))
    grads = found[1] if isinstance(found, tuple) else found
    assert isinstance(grads, list) or not torch.allclose(grads["blocks.0.q.weight"], without["blocks.0.q.weight"])


@pytest.mark.slow
@pytest.mark.everyday(1)
@on_meshes(*MESHES)
def test_every_mesh_drops_what_one_rank_drops(mesh: DeviceMesh) -> None:
    programs = (_value_and_grad, _twice, _torch_grad, _closed_over, _hvp, _slope, _members)
    for program in (_per_sample, *programs[mesh["tp"].size() // 2 :: 3]):
        _require_like_one_rank(mesh, program)
    _require_like_one_rank(mesh, _per_sample, regather=False)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_checkpoint_drops_the_same_again(mesh: DeviceMesh) -> None:
    model, x = _model(), sf.data.local_batch(_batch(), mesh)
    params = sf.shard(model, mesh, _policy())
    for checkpoints in ("method", "block", "block method"):
        _require_like_one_rank(mesh, _value_and_grad, checkpoints)
        found = []
        for each in (model, _model(checkpoints)):
            with sf.data.dropout_seed(SEED):
                found.append(_value_and_grad(each, params, x))
        assert_parity(found[1], found[0], tol=1e-12)


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_units_that_are_compiled_drop_the_same(mesh: DeviceMesh) -> None:
    _require_like_one_rank(mesh, _value_and_grad, compile={"backend": "eager"})


@on_meshes({"fsdp": 2, "tp": 2})
def test_masks_differ_between_samples_calls_modules_and_seeds(mesh: DeviceMesh) -> None:
    x = torch.ones(3, 4096, 4)

    def masks(*seed: Any, place: int = 1, calls: int = 1) -> Tensor:
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Identity(), nn.Identity()]
        layers[place] = nn.Dropout(0.5)
        model = nn.Sequential(*layers)
        params = sf.tree.map(torch.ones_like, sf.shard(model, mesh, sf.Policy()))
        with sf.data.dropout_seed(*seed):
            found = [(sf.apply(model, params, x) != 0).float() for _ in range(calls)]
        return found[-1]

    first = masks(0)
    assert torch.equal(first, masks(0)) and torch.equal(masks(5), masks(torch.tensor(5)))
    over_tp = sf.collectives.all_gather_invariant(first, mesh, "tp", 0).unflatten(0, (2, 3))
    over_fsdp = sf.collectives.all_gather_invariant(first, mesh, "fsdp", 0)
    assert torch.equal(over_tp[0], over_tp[1])
    others = [masks(1), masks(0, 1), masks(1, 0), masks(-1), masks(2**32), masks(0, calls=2), masks(0, place=2)]
    every = torch.stack([part.flatten() for part in (*over_fsdp, *(other[0] for other in others))])
    apart = torch.corrcoef(every)[~torch.eye(len(every), dtype=torch.bool)]
    assert apart.abs().max() < 5 * every.shape[1] ** -0.5
    assert abs(float(over_fsdp.mean()) - 0.5) < 0.01


def _mask(shape: tuple[int, ...], p: float, *seed: int, firsts: Any = None, use: tuple[int, ...] = ()) -> Tensor:
    keys = masks_of.key_of("dropout", seed)
    return masks_of.dropped(shape, firsts or [0] * len(shape), p, keys, use, "cpu").double()


def test_masks_are_those_of_every_release() -> None:
    """A run that goes on from a checkpoint drops what it would have dropped."""
    rows = [sum(int(bit) << i for i, bit in enumerate(reversed(row))) for row in _mask((4, 64), 0.5, 7, 8, use=(1, 2))]
    assert rows == [0x21E973A19A544712, 0x4AEC8D24E1B67CF8, 0x8542A30859AD86C6, 0xE586EB77796E8993]


def test_rates_and_independence() -> None:
    """Each mean within 5 standard errors; rows, columns, seeds and uses uncorrelated."""
    for p in (0.1, 0.5, 0.999):
        mask = _mask((256, 1024), p, 1)
        assert abs(mask.mean() - p) < 5 * (p * (1 - p) / mask.numel()) ** 0.5
    mask = _mask((256, 1024), 0.3, 2)
    seeds = torch.stack([_mask((4096,), 0.3, seed) for seed in range(200)])
    uses = torch.stack([_mask((64, 64), 0.3, 1, use=(i // 20, i % 20)).flatten() for i in range(200)])
    for table in (mask, mask.T, seeds, uses):
        apart = torch.corrcoef(table)[~torch.eye(len(table), dtype=torch.bool)]
        assert apart.abs().max() < 5.5 * table.shape[1] ** -0.5
        assert abs(float(apart.std()) * table.shape[1] ** 0.5 - 1) < 0.05
    parts = [_mask((2, 3), 0.5, 3, firsts=[i, j]) for i in range(2) for j in range(2)]
    whole = torch.cat([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)])
    assert torch.equal(whole, _mask((4, 6), 0.5, 3))
    assert _mask((), 0.5, 1).shape == () and _mask((0, 3), 0.5, 1).shape == (0, 3)


@pytest.mark.everyday(8)
@pytest.mark.parametrize(
    ("module", "shape", "whole"),
    [
        (nn.Dropout1d(0.4), (30, 40, 5), 2),
        (nn.Dropout1d(0.4), (1200, 5), 1),
        (nn.Dropout2d(0.4), (30, 40, 3, 2), 2),
        (nn.Dropout3d(0.4), (30, 40, 2, 2, 2), 2),
        (nn.Dropout3d(0.4), (1200, 2, 2, 2), 1),
        (nn.FeatureAlphaDropout(0.4), (30, 40, 5), 2),
        (nn.AlphaDropout(0.4), (30, 40), 2),
        (nn.Dropout(0.4, inplace=True), (30, 40), 2),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)
def test_every_kind_of_dropout_keeps_the_mean_of_its_input(
    module: nn.Module, shape: tuple[int, ...], whole: int
) -> None:
    model = nn.Sequential(nn.LayerNorm(shape[-1], elementwise_affine=True), module)
    mesh = sf.make_mesh("cpu", fsdp=1)
    params = sf.shard(model, mesh, sf.Policy())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    with sf.data.dropout_seed(1):
        y = sf.apply(model, params, x)
    module.eval()
    kept = sf.apply(model, params, x)
    alpha = isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout)
    if alpha:
        torch.manual_seed(0)
        theirs = module.train()(kept)
        dropped = y.flatten().mode().values
        torch.testing.assert_close(dropped, theirs.flatten().mode().values)
        gone = y == dropped
        stays = ~gone & (theirs != theirs.flatten().mode().values)
        torch.testing.assert_close(y[stays], theirs[stays])
    else:
        gone = y == 0
        assert torch.allclose(y[~gone], kept[~gone] / 0.6)
    together = gone.reshape(*gone.shape[:whole], -1)
    assert (together.all(-1) | ~together.any(-1)).all()
    assert abs(float(gone.float().mean()) - 0.4) < 0.06


@pytest.mark.slow
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_compiled_step_takes_the_seed_as_a_tensor(mesh: DeviceMesh) -> None:
    model, x = _model(blocks=1), sf.data.local_batch(_batch(), mesh)
    params = sf.shard(model, mesh, _policy())
    recorded = 0

    def step(p: sf.Params, seed: Tensor) -> Any:
        nonlocal recorded
        recorded += 1
        with sf.data.dropout_seed(seed):
            return sf.value_and_grad(_loss(model))(p, x)

    fast = sf.jit(step, backend="aot_eager")
    losses = set()
    for seed in range(3):
        found, wanted = fast(params, torch.tensor(seed)), step(params, torch.tensor(seed))
        assert_parity((found[0], sf.gather(found[1])), (wanted[0], sf.gather(wanted[1])), tol=1e-10)
        losses.add(float(found[0]))
    assert len(losses) == 3 and recorded == 4
    around = sf.jit(lambda p: sf.apply(model, p, x).detach(), backend="aot_eager")
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="open it inside of the step"):
        around(params)
    around(params)
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="open it inside of the step"):
        around(params)


class _Reshaped(nn.Module):
    """Drops split features and whole ones side by side, or samples and features: no dim says how it is split."""

    def __init__(self, joins: bool = False, halves: bool = False) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8)
        self.joins, self.halves = joins, halves

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.halves:
            return self.down(torch.cat(self.drop(h).chunk(2, -1), -1))
        if self.joins:  # samples and tokens with features of this rank between them
            return self.down(rearrange(self.drop(rearrange(h, "b s c -> (b c) s")), "(b c) s -> b s c", b=len(x)))
        h = torch.cat([h, x[..., :2].expand_as(h[..., :2])], -1)
        return self.down(self.drop(h)[..., :-2])


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_split_dim_that_is_not_found_is_asked_for(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(_Reshaped()).double(), sf.data.local_batch(_batch(), mesh)
    rules = {"0.up.weight": "ff@tp c@fsdp", "0.up.bias": "ff@tp", "0.down.weight": "c@fsdp ff@tp"}
    params = sf.shard(model, mesh, sf.Policy(rules=rules))
    with (
        sf.data.dropout_seed(1),
        pytest.raises(sf.ShardError, match=r"in '0.down'.*cat of split values and values that all ranks share"),
    ):
        sf.apply(model, params, x)
    joined = nn.Sequential(_Reshaped(joins=True)).double()
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="before heads are joined"):
        sf.apply(joined, sf.shard(joined, mesh, sf.Policy(rules=rules)), x)
    fused = nn.Sequential(_Reshaped(halves=True)).double()
    in_halves = {"0.up.weight": "(2 ff@tp) c@fsdp", "0.up.bias": "(2 ff@tp)", "0.down.weight": "c@fsdp (2 ff@tp)"}
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="no dim of it explains how"):
        sf.apply(fused, sf.shard(fused, mesh, sf.Policy(rules=in_halves)), x)
    said = sf.shard(fused, mesh, sf.Policy(rules=in_halves, acts={"0.drop": "b s c@tp"}))
    with sf.data.dropout_seed(1):
        assert sf.apply(fused, said, x).shape == x.shape


class _ByName(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return self[2](self[1](input=self[0](input)))


def test_a_module_may_be_given_its_input_by_name() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    rules = {"0.weight": "ff@tp c", "0.bias": "ff@tp", "2.weight": "c ff@tp"}
    found = []
    with sf.simulate(tp=2) as mesh:
        params = sf.shard(plain, mesh, sf.Policy(rules=rules))
        for model in (plain, _ByName(*plain)):
            with sf.data.dropout_seed(1):
                found.append(sf.apply(model, params, torch.ones(3, 8)).reconcile())
    assert torch.equal(*found)


@on_meshes({"fsdp": 2, "tp": 2})
def test_acts_say_where_an_activation_is_split(mesh: DeviceMesh) -> None:
    said = {"blocks.*.drop_scores": "b@fsdp h@tp s t", "blocks.*.drop_hidden": "b s ff@tp"}
    _require_like_one_rank(mesh, _value_and_grad, acts=said)
    wrong = sf.shard(_model(), mesh, _policy(acts={"blocks.*.drop_hidden": "b ff@tp"}))
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="3"):
        sf.apply(_model(), wrong, sf.data.local_batch(_batch(), mesh))


class Loops(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.3)
        self.times, self.own = 1, own

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times if self.own else int(os.environ["SHARDFN_TEST_TIMES"])):
            x = self.down(self.drop(torch.tanh(self.up(x))))
        return x


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_call_that_the_run_without_data_did_not_make_is_asked_for(mesh: DeviceMesh) -> None:
    rules, acts = {"up.weight": "ff@tp c", "down.weight": "c ff@tp"}, {"drop": "b s ff@tp"}
    for own in (True, False):  # an attribute is compared at each call, the environment is not
        found = []
        for chosen in (sf.Policy(rules=rules), sf.Policy(rules=rules, acts=acts)):
            torch.manual_seed(1)
            model = Loops(own).double()
            params = sf.shard(model, mesh, chosen)
            os.environ["SHARDFN_TEST_TIMES"] = "1"
            with sf.data.dropout_seed(1):
                sf.apply(model, params, _batch())
            model.times = 2
            os.environ["SHARDFN_TEST_TIMES"] = "2"
            with sf.data.dropout_seed(1):
                if own or chosen.acts:
                    found.append(sf.apply(model, params, _batch()))
                    continue
                with pytest.raises(sf.ShardError, match=r"call 2 of 'drop' .* Policy\(acts="):
                    sf.apply(model, params, _batch())
        with sf.simulate(fsdp=1, tp=1) as one, sf.data.dropout_seed(1):
            wanted = sf.apply(model, sf.shard(model, one, sf.Policy()), _batch())
        assert_parity(found, [_at_one(wanted)] * len(found), tol=1e-10)


def test_a_recomputation_that_draws_other_numbers_is_refused() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)

    model, mesh = Forgets(), sf.make_mesh("cpu", fsdp=1)
    params = sf.shard(model, mesh, sf.Policy())
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match="preserve_rng_state=True"):
        sf.grad(lambda p: sf.apply(model, p, torch.ones(2, 4)).sum())(params)


def _applied(model: nn.Module, params: sf.Params, x: Tensor) -> Tensor:
    with sf.data.dropout_seed(1):
        return sf.apply(model, params, x)


def test_vmaps_that_samples_cannot_be_told_apart_in() -> None:
    model, mesh = _model(), sf.make_mesh("cpu", fsdp=1, tp=1)
    params, x = sf.shard(model, mesh, _policy()), _batch()
    with sf.data.dropout_seed(1):
        with pytest.raises(sf.ShardError, match=r"use sf\.vmap"):
            torch.func.vmap(lambda x: _loss(model)(params, x))(x)
        same = sf.vmap(lambda p, x: sf.apply(model, p, x[None]), in_dims=(None, 0), randomness="same")
        torch.testing.assert_close(*same(params, x[:1].expand(2, -1, -1)))
        whole, chunks = (
            sf.vmap(lambda p, x: sf.apply(model, p, x[None]), in_dims=(None, 0), chunk_size=size) for size in (None, 1)
        )
    for mapped in (whole, chunks):
        with sf.data.dropout_seed(1):
            torch.testing.assert_close(mapped(params, x)[:, 0], _applied(model, params, x))
    with sf.data.dropout_seed(1):
        closed_over = sf.vmap(lambda x: sf.apply(model, params, x[None]))(x)
    torch.testing.assert_close(closed_over[:, 0], _applied(model, params, x))
    with sf.data.dropout_seed(1):
        each = sf.vmap(lambda p, x: sf.apply(model, p, x[None]), in_dims=(None, 0))
        assert not torch.allclose(*each(params, x[:1].expand(2, -1, -1)))


def test_bad_input() -> None:
    x = torch.ones(4, 4)
    wrong: list[Any] = [
        (),
        (0.5,),
        (True,),
        (torch.ones(2, dtype=torch.long),),
        (torch.tensor(1.0),),
        (torch.tensor(True),),
        ("1",),
    ]
    for seed in wrong:
        with pytest.raises(TypeError, match="seed"), sf.data.dropout_seed(*seed):
            pass
        with pytest.raises(TypeError, match="seed"):
            sf.data.dropout(x, seed=seed)
    assert not sf.data.dropout(x, 1 - 1e-12, seed=1).any()
    with pytest.raises(ValueError, match="p=2"):
        sf.data.dropout(x, 2, seed=1)
    with pytest.raises(sf.ShardError, match="pass mesh="):
        sf.data.dropout(x, seed=1, dims="b@fsdp c")
    mesh = sf.make_mesh("cpu", fsdp=1)
    with pytest.raises(sf.ShardError, match="unknown mesh axis 'tp'"):
        sf.data.dropout(x, seed=1, dims="b@tp c", mesh=mesh)
    with sf.simulate(tp=2) as two, pytest.raises(sf.ShardError, match="inner factor"):
        sf.data.dropout(x, seed=1, dims="b (q c@tp)", mesh=two)
    with pytest.raises(sf.ShardError, match="inside a vmap"):
        torch.func.vmap(lambda x: sf.data.dropout(x, seed=1))(x)
    assert torch.equal(sf.data.dropout(x, 0.5, seed=1, training=False), x) and not sf.data.dropout(x, 1.0, seed=1).any()
    assert torch.equal(sf.data.dropout(x, 0.5, seed=(1, 2)), sf.data.dropout(x, 0.5, seed=[1, torch.tensor(2)]))
