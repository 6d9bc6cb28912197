"""Activations split along the sequence between modules: numbers as on one rank, counts, bytes kept, refusals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, InDouble
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from trials import found_of

import shardfn as sf
from shardfn.comm import buckets
from shardfn.testing import assert_parity, count_collectives, on_meshes, run

MESHES = ({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
SPLIT = {"layers.*": "b s@tp c"}
VOCAB, C, HEAD_DIM = 24, 16, 4


# -- models of transformers -------------------------------------------------------------------------------------------

_EVEN_IMAGES = replace(
    FAMILIES["ViT"],
    model="ViTModel",
    fields=FAMILIES["ViT"].fields | {"image_size": 20, "patch_size": 4},
    inputs=lambda ids: {
        "pixel_values": torch.randn(len(ids), 3, 20, 20, generator=torch.Generator().manual_seed(2)).double()
    },
    loss=lambda out, ids: out.last_hidden_state[:, 1:].square().mean() + out.pooler_output.square().mean(),
)
SPLIT_FAMILIES = (
    "Llama Qwen3 Gemma3 Phi3 GPT-2 GPT-NeoX BLOOM Granite OLMo2 Cohere StarCoder2 DeepSeek-V3 LongCat-Flash "
    "Mixtral Qwen3-MoE BERT T5"
).split()


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", [*SPLIT_FAMILIES, "OPT", "ViT", "ViT, 26 positions", "CLIP"])
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_family_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    _require_family_like_one_rank(mesh, name)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "T5", "ViT", "ViT, 26 positions"])
@on_meshes({"fsdp": 1, "tp": 4})
def test_a_family_on_four_parts_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
    _require_family_like_one_rank(mesh, name)


def _require_family_like_one_rank(mesh: DeviceMesh, name: str) -> None:
    family = _EVEN_IMAGES if name == "ViT, 26 positions" else FAMILIES[name]
    model, reference = family.make(), family.make()
    params = sf.shard(model, mesh, sf.policies.from_transformers(model, sequence_parallel=True))
    inputs, ids = family.batch()
    local, local_ids = sf.data.local_batch((inputs, ids), mesh)
    with InDouble():
        expected = family.loss(reference(**inputs), ids)
        expected.backward()
        loss, grads = sf.value_and_grad(lambda p: family.loss(sf.apply(model, p, **local), local_ids))(params)
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-9)
    named = reference.named_parameters(remove_duplicate=False)
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}
    assert_parity(sf.gather(grads), wanted, tol=1e-9)
    found = found_of(model)
    splits = name in SPLIT_FAMILIES or (name == "ViT, 26 positions" and mesh["tp"].size() == 2)
    assert bool(found.inputs) == splits, "left whole by '?' where positions do not divide; OPT's layers flatten samples"


# -- written by hand --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads of this rank, by sizes of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention in a module of its own, the MLP's linears as children, a scale used directly, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(C), nn.LayerNorm(C), Attention()
        self.up, self.down, self.drop = nn.Linear(C, 2 * C), nn.Linear(2 * C, C), nn.Dropout(0.25)
        self.layer_scale = nn.Parameter(torch.linspace(0.1, 1, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale * self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.down(F.silu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Blocks between a table and a head with the same weight; `before` and `after` act on activations."""

    def __init__(
        self, before: Callable[[Tensor], Tensor] | None = None, after: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.layers = nn.Embedding(VOCAB, C), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.before, self.after = before, after

    def forward(self, ids: Tensor) -> Any:
        x, hidden = self.emb(ids), []
        for layer in self.layers:
            x = layer(x if self.before is None else self.before(x))
            hidden.append(x)
        return self.head(self.norm(x)) if self.after is None else self.after(hidden)


RULES = {
    "layers.*.attn.{wq,wk,wv}.weight": "(heads@tp d) c@fsdp",
    "layers.*.attn.wo.weight": "c@fsdp (heads@tp d)",
    "layers.*.up.weight": "ff@tp c@fsdp",
    "layers.*.down.weight": "c@fsdp ff@tp",
    "emb.weight": "vocab@tp c@fsdp",
}


def _policy(**fields: Any) -> sf.Policy:
    return sf.Policy(**({"rules": RULES, "sizes": {"d": HEAD_DIM}, "acts": SPLIT} | fields))


def _ids(samples: int = 4, length: int = 8) -> Tensor:
    return torch.randint(0, VOCAB, (samples, length), generator=torch.Generator().manual_seed(1))


def _loss(out: Any) -> Tensor:
    """A mean over samples."""
    leaves = out if isinstance(out, list | tuple) else [out]
    return torch.stack([(leaf * (1 + leaf)).mean() for leaf in leaves]).sum()


def _require_like_one_rank(mesh: DeviceMesh, model: nn.Module, policy: sf.Policy, ids: Tensor) -> None:
    params, local = sf.shard(model, mesh, policy), sf.data.local_batch(ids, mesh)
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, local)))(params)
    _require_gradients_of_one_rank(model, ids, loss, grads)


def _require_gradients_of_one_rank(model: nn.Module, ids: Tensor, loss: Tensor, grads: sf.Params) -> None:
    reference = _loss(model(ids))
    expected = torch.autograd.grad(reference, list(model.parameters()), materialize_grads=True)
    assert_parity({"loss": loss}, {"loss": reference.detach()}, tol=1e-9)
    full = sf.gather(grads)
    assert_parity({n: full[n] for n, _ in model.named_parameters()}, _named(model, expected), tol=1e-9)


def _named(model: nn.Module, values: Any) -> dict[str, Tensor]:
    return {name: value for (name, _), value in zip(model.named_parameters(), values, strict=True)}


def _model(*args: Any, **kwargs: Any) -> Decoder:
    return Decoder(*args, **kwargs).double().eval()


AFTER: dict[str, Callable[[list[Tensor]], Any]] = {
    "all hidden states": lambda hidden: hidden,
    "the first position": lambda hidden: hidden[-1][:, 0],
    "the last position": lambda hidden: hidden[-1][:, -1],
    "the mean": lambda hidden: hidden[-1].mean(1),
    "a difference": lambda hidden: hidden[-1][:, 1:] - hidden[0][:, :-1],
    "flat": lambda hidden: hidden[-1].flatten(0, 1),
    "positions first": lambda hidden: hidden[-1].transpose(0, 1),
    "a sum over features": lambda hidden: hidden[-1].sum(-1),
    "a sum over layers": lambda hidden: torch.stack(hidden).sum(0),
}


@pytest.mark.parametrize("after", AFTER)
@on_meshes({"fsdp": 2, "tp": 2})
def test_what_is_made_of_split_activations_is_as_on_one_rank(mesh: DeviceMesh, after: str) -> None:
    model = _model(after=AFTER[after])
    _require_like_one_rank(mesh, model, _policy(), _ids())
    assert found_of(model).inputs, "activations are split"


@pytest.mark.parametrize(("samples", "length"), [(4, 4), (4, 8), (8, 8), (4, 16), (16, 4), (2, 8)])
@on_meshes({"fsdp": 1, "tp": 4})
def test_sizes_that_are_alike_are_told_apart(mesh: DeviceMesh, samples: int, length: int) -> None:
    """As many positions as samples, features or ranks: with 4 on 4 ranks each has one, which broadcasts."""
    model = _model()
    _require_like_one_rank(mesh, model, _policy(), _ids(samples, length))
    assert len(found_of(model).scattered) == 4


_EVENS: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: x * (1 + torch.arange(x.shape[1], device=x.device)[None, :, None]),
    "positions of a table": lambda x: x + torch.linspace(0, 1, 8, dtype=x.dtype, device=x.device)[:, None],
    "a mask": lambda x: x.masked_fill((torch.arange(8, device=x.device) > 5)[:, None], 0),
    "divided by the length": lambda x: x / x.shape[1],
    "the length in a tensor": lambda x: x * torch.tensor(float(x.shape[1]), dtype=x.dtype, device=x.device),
    "the length in a new tensor": lambda x: x * x.new_tensor([x.shape[1]]),
    "the length in a filled tensor": lambda x: x * x.new_full((1,), x.shape[1]),
    "shifted by the length": lambda x: x.roll(x.shape[1] // 4, -1),
    "an eps of the length": lambda x: F.layer_norm(x, (C,), eps=x.shape[1]),
    "a norm of the length": lambda x: x / x.norm(p=x.shape[1] / 4, dim=-1, keepdim=True),
    "a feature of the length": lambda x: x * x[..., x.shape[1] // 4, None],
    "features from the length on": lambda x: x * x.narrow(-1, x.shape[1] // 4, 1),
    "another way for short ones": lambda x: x.relu() if x.shape[1] > 4 else x.tanh(),
    "nothing for short ones": lambda x: x.relu() if x.shape[1] > 4 else x,
    "nothing for long ones": lambda x: x if x.shape[1] > 4 else x.softmax(-1),
    "more for long ones": lambda x: x.softmax(-1) if x.shape[1] > 4 else x,
    "as often as the length": lambda x: torch.cat([x[:, i : i + 1] * i for i in range(x.shape[1])], 1),
    "minus the mean": lambda x: x - x.mean(1, keepdim=True),
    "plus the first": lambda x: x + x[:, :1],
    "turned": lambda x: x + x.roll(1, 1),
    "softmax along it": lambda x: x * x.softmax(1),
    "itself with itself": lambda x: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "its Gram matrix": lambda x: x + x @ (x.transpose(1, 2) @ x),
    "sorted": lambda x: x.sort(1).values,
    "written in place": lambda x: x.clone().mul_(2),
}


@pytest.mark.everyday(1)
@pytest.mark.sample(14)
@pytest.mark.parametrize("before", _EVENS)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_block_that_mixes_positions_is_as_on_one_rank(mesh: DeviceMesh, before: str) -> None:
    """What a rank would compute otherwise from its positions is found; the block gets them all, or its part of else."""

    class Mixing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_EVENS[before](x))

    model = _model()
    model.layers = nn.ModuleList(Mixing().double().eval() for _ in range(2))
    _require_like_one_rank(mesh, model, _policy(), _ids())
    found = found_of(model)
    stays_split = before in ("positions of a table", "a mask", "written in place")
    assert bool(found.inputs) == stays_split != bool(found.entries)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_value_that_another_length_decides_is_refused(mesh: DeviceMesh) -> None:
    def half(x: Tensor) -> Tensor:
        return x * 2 if bool((torch.arange(x.shape[1], device=x.device) > 3).any()) else x.relu()

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(half(x))

    model = _model()
    model.layers = nn.ModuleList(Asking().double().eval() for _ in range(2))
    try:
        _require_like_one_rank(mesh, model, _policy(), _ids())
    except sf.ShardError as problem:
        assert "decides by False, which is True on one rank" in str(problem)


ENTRIES: dict[str, dict[str, str]] = {
    "samples": {"layers.*": "b@tp s c"},
    "any dims before": {"layers.*": "... s@tp c"},
    "any dims after": {"layers.*": "_ s@tp ..."},
    "nested": {"layers.*": "b s@tp c", "layers.*.attn": "b s@tp c"},
    "norms": {"layers.*.{norm1,norm2}": "b s@tp c"},
    "one layer": {"layers.1": "b s@tp c"},
    "the table": {"emb": "b s@tp c", "layers.*": "b s@tp c", "norm": "b s@tp c"},
    "where it divides": {"layers.*": "b s@tp? c"},
    "a linear": {"layers.*.down": "b s@tp c"},
    "attention": {"layers.*.attn": "b s@tp c"},
    "other dims than there are": {"layers.*": "b x s@tp c"},
    "the model": {"": "b s@tp c"},
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("entry", ENTRIES)
@on_meshes({"fsdp": 2, "tp": 2})
def test_entries_are_as_on_one_rank(mesh: DeviceMesh, entry: str) -> None:
    _require_like_one_rank(mesh, _model(), _policy(acts=ENTRIES[entry]), _ids(8))


@on_meshes(*MESHES)
def test_dropout_is_that_of_one_rank(mesh: DeviceMesh) -> None:
    model, ids = _model().train(), _ids()
    alone = sf.shard(model, sf.make_mesh("cpu", fsdp=mesh.size(), tp=1), sf.Policy())
    split = sf.shard(model, mesh, _policy())
    found = []
    for params in (alone, split):
        local = sf.data.local_batch(ids, params.mesh)
        with sf.data.dropout_seed(3):
            loss, grads = sf.value_and_grad(lambda p, x: _loss(sf.apply(model, p, x)))(params, local)
        found.append({"loss": loss} | sf.gather(grads))
    assert_parity(found[1], found[0], tol=1e-9)


@on_meshes({"fsdp": 1, "tp": 4})
def test_transforms_are_as_on_one_rank(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids()
    named = {name: x.detach() for name, x in model.named_parameters()}
    params, local = sf.shard(model, mesh, _policy()), sf.data.local_batch(ids, mesh)

    def whole(p: dict[str, Tensor]) -> Tensor:
        return _loss(torch.func.functional_call(model, p, ids))

    def split(p: sf.Params) -> Tensor:
        return _loss(sf.apply(model, p, local))

    expected = torch.func.grad(whole)(named)
    assert_parity(sf.gather(sf.grad(split)(params)), expected | {"head.weight": expected["emb.weight"]}, tol=1e-9)
    wanted = torch.func.jvp(whole, (named,), (named,))
    found = sf.jvp(split, (params,), (params,))
    assert_parity({"0": found[0], "1": found[1]}, {"0": wanted[0], "1": wanted[1]}, tol=1e-9)
    weights = torch.randn(*ids.shape, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    out, pull = sf.vjp(lambda p: sf.apply(model, p, local), params)
    whole_vjp: Any = torch.func.vjp(lambda p: torch.func.functional_call(model, p, ids), named)
    expected_out, expected_pull = whole_vjp
    found, wanted = sf.gather(pull(weights)[0]), expected_pull(weights)[0]
    assert_parity({"": out} | {name: found[name] for name in wanted}, {"": expected_out} | wanted, tol=1e-9)
    product = torch.func.jvp(torch.func.grad(whole), (named,), (named,))[1]
    found = sf.gather(sf.hvp(split, (params,), params))
    assert_parity({name: found[name] for name in product}, product, tol=1e-8)


@on_meshes({"fsdp": 1, "tp": 2})
def test_two_gathers_and_two_scatters_a_layer(mesh: DeviceMesh) -> None:
    """Forward; the backward has their transposes, and gathers what autograd kept a piece of."""
    counted = []
    for layers in (1, 2):
        family = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | {"num_hidden_layers": layers})
        model = family.make()
        params = sf.shard(model, mesh, sf.policies.from_transformers(model, sequence_parallel=True))
        inputs, ids = family.batch()
        for _ in range(2):  # the first calls compare their batches
            sf.apply(model, params, input_ids=inputs["input_ids"])
        leaves = sf.tree.map(lambda x: x.detach().requires_grad_(), params)
        with count_collectives() as forward:
            loss = family.loss(sf.apply(model, leaves, input_ids=inputs["input_ids"]), ids)
        with count_collectives() as backward:
            loss.backward()
        counted.append((forward.as_dict(), backward.as_dict()))
    more = [
        {key: two[key] - one.get(key, 0) for key in two if two[key] != one.get(key, 0)}
        for one, two in zip(*counted, strict=True)
    ]
    assert more == [
        {"all_gather": 2, "all_to_all": 2},  # gloo scatters sums by an all-to-all
        {"all_gather": 4, "all_to_all": 2, "all_reduce": 2},  # for the weights of the two norms
    ]


def _kept(tp: int, sequence: bool) -> int:
    """Bytes that autograd keeps of a forward, besides weights."""
    mesh = sf.make_mesh("cpu", fsdp=4 // tp, tp=tp)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 256}
    family = replace(FAMILIES["Llama"], fields=FAMILIES["Llama"].fields | sizes)
    model = family.make().float()
    policy = sf.policies.from_transformers(model, sequence_parallel=sequence) if tp > 1 else sf.Policy()
    params = sf.tree.map(lambda x: x.detach().requires_grad_(), sf.shard(model, mesh, policy))
    seen: dict[int, int] = {}

    def kept(x: Any) -> Any:
        parts = [x.activation._own] if hasattr(x, "activation") else [x] if isinstance(x, Tensor) else x
        for own in parts:
            if isinstance(own, Tensor) and own.numel():
                seen[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
        return x

    ids = torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    weights = {x.to_local().untyped_storage().data_ptr() for x in params.values()}
    patch = pytest.MonkeyPatch()
    made = saved_tensors_hooks
    patch.setattr(
        "shardfn.engine.saved_tensors.saved_tensors_hooks", lambda pack, unpack: made(lambda x: kept(pack(x)), unpack)
    )
    try:
        out = sf.apply(model, params, input_ids=ids).logits  # alive, so that no address is used twice
    finally:
        patch.undo()
    assert out.requires_grad
    return sum(size for at, size in seen.items() if at not in weights)


def test_the_graph_keeps_this_ranks_positions() -> None:
    whole, split, sequence = (run(_kept, *given, ranks=4)[0] for given in ((1, False), (4, False), (4, True)))
    assert sequence / whole < 0.27 < 0.4 < split / whole


@pytest.mark.everyday(7)
@pytest.mark.parametrize(
    ("acts", "length", "match"),
    [
        (SPLIT, 7, r"splits dim 1 at 'layers\.0' by 'b s@tp c', 7 over tp=2, 7 % 2 = 1\. Pad .*'@tp\?'"),
        ({"layers.*": "b s@tp c@tp"}, 8, r"mesh axis|splits features"),
        ({"layers.*": "b s@tpp c"}, 8, r"unknown mesh axis 'tpp'; the mesh has fsdp=1, tp=2; did you mean 'tp'"),
        ({"blocks.*": "b s@tp c"}, 8, r"'blocks\.\*' matches no module"),
    ],
)
def test_entries_that_cannot_be_served_are_errors(acts: dict[str, str], length: int, match: str) -> None:
    model = _model()
    with pytest.raises(sf.ShardError, match=match):
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), _policy(acts=acts), example=_ids(4, length))


@pytest.mark.everyday(1)
def test_bytes_that_travel_are_counted() -> None:
    """By 2 ranks, each half of [4, 8, 16] in float64: gathers and scatters take what all-reduces took."""
    model = _model()
    plain, split = (
        sf.plan(model, sf.MeshSpec(fsdp=1, tp=2), _policy(acts=acts), example=_ids()).activation_bytes
        for acts in ({}, SPLIT)
    )
    assert plain and split and plain <= split <= 1.5 * plain


@on_meshes({"fsdp": 1, "tp": 2})
def test_lengths_of_later_calls(mesh: DeviceMesh) -> None:
    model = _model()
    params = sf.shard(model, mesh, _policy(acts={"layers.*": "b s@tp? c"}))
    for length in (8, 7, 2, 12, 1):
        ids = _ids(4, length)
        assert_parity({"": sf.apply(model, params, ids)}, {"": model(ids)}, tol=1e-9)


class Checkpoints(Block):
    """Recomputes its forward, or its halves."""

    def __init__(self, reentrant: bool, halves: bool) -> None:
        super().__init__()
        self.reentrant, self.halves = reentrant, halves

    def forward(self, x: Tensor) -> Tensor:
        if not self.halves:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        x = x + self.layer_scale * checkpoint(self.attn, self.norm1(x), use_reentrant=self.reentrant)
        return checkpoint(lambda x: x + self.down(F.silu(self.up(self.norm2(x)))), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@on_meshes({"fsdp": 2, "tp": 2})
def test_checkpoints(mesh: DeviceMesh, reentrant: bool, halves: bool) -> None:
    model, ids = _model(), _ids()
    model.layers = nn.ModuleList(Checkpoints(reentrant, halves).double().eval() for _ in range(2))
    if not reentrant:
        _require_like_one_rank(mesh, model, _policy(), ids)
    _loss(model(ids)).backward()
    leaves = sf.tree.map(lambda x: x.detach().requires_grad_(), sf.shard(model, mesh, _policy()))
    _loss(sf.apply(model, leaves, sf.data.local_batch(ids, mesh))).backward()  # torch.autograd.grad cannot be reentrant
    full = sf.gather(sf.tree.map(lambda x: x.grad, leaves))
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert_parity({name: full[name] for name in wanted}, wanted, tol=1e-9)
    assert len(found_of(model).scattered) == 4


def _plan_of_torch() -> dict[str, Any]:
    """The usual one for a decoder."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    norms = {f"layers.*.{name}": SequenceParallel() for name in ("norm1", "norm2")}
    attention = {f"layers.*.attn.{name}": column for name in ("wq", "wk", "wv")} | {"layers.*.attn.wo": row}
    ends = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    into = ends | {"layers.*.attn": gathered, "layers.*.up": ColwiseParallel(input_layouts=Shard(1))}
    return norms | attention | into | {"layers.*.down": row, "norm": SequenceParallel()}


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_plan_of_torch(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids()
    policy = sf.policies.from_parallelize_plan(_plan_of_torch())
    _require_like_one_rank(mesh, model, policy, ids)
    assert found_of(model).scattered


@on_meshes({"fsdp": 1, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_torch_finds_the_same_by_its_plan(mesh: DeviceMesh) -> None:
    model, theirs, ids = _model(), _model(), _ids()
    for made in (model, theirs):  # torch does not split a table and a head that are one
        made.head.weight = nn.Parameter(made.emb.weight.detach() * 2)
    params = sf.shard(model, mesh, sf.policies.from_parallelize_plan(_plan_of_torch()))
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, ids)))(params)
    parallelize_module(theirs, mesh["tp"], _plan_of_torch())
    expected = _loss(theirs(ids))
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-9)
    full, named = sf.gather(grads), dict(theirs.named_parameters())
    wanted = {name: buckets.whole(p.grad) for name, p in named.items() if isinstance(p.grad, DTensor)}
    assert named.keys() - wanted.keys() == {
        "layers.0.layer_scale",
        "layers.1.layer_scale",
    }  # torch leaves these partial
    assert_parity({name: full[name] for name in wanted}, wanted, tol=1e-9)


class Writing(Attention):
    """Changes what it was given after the first linear has read it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x)
        x.mul_(2)
        return self.wo(q + self.wk(x) + self.wv(x))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_gathered_activation_that_is_written_is_an_error(mesh: DeviceMesh) -> None:
    """As it is on one rank."""
    model, ids = _model(), _ids()
    for layer in model.layers:
        layer.attn = Writing().double()
    params = sf.shard(model, mesh, _policy())
    with pytest.raises(sf.ShardError, match=r"attn.wk.*modified inplace"):  # by the shape-only trace
        sf.grad(lambda p: _loss(sf.apply(model, p, ids)))(params)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _loss(model(ids)).backward()


class WritingFirst(Attention):
    """Changes what it was given before anything has read it."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.wo(self.wq(x) + self.wk(x) + self.wv(x))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_gathered_activation_that_is_written_first_is_saved_as_it_was_then(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids()
    for layer in model.layers:
        layer.attn = WritingFirst().double()
    params = sf.shard(model, mesh, _policy())
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, ids)))(params)
    expected = _loss(model(ids))
    expected.backward()
    assert_parity({"loss": loss}, {"loss": expected.detach()}, tol=1e-9)
    named = model.named_parameters(remove_duplicate=False)
    assert_parity(sf.gather(grads), {name: p.grad for name, p in named if p.grad is not None}, tol=1e-9)


# -- what layers are given and give -----------------------------------------------------------------------------------


class Wrapped(Block):
    """A block whose inputs and outputs are what `how` makes of them."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(super().forward, *args, **kwargs)


class Through(Decoder):
    """A decoder that calls its layers as `through` does."""

    def __init__(self, how: Callable[..., Any], through: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.through = nn.ModuleList(Wrapped(how) for _ in range(2)), through

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.through(self.emb(ids), *self.layers)))


@dataclass
class State:
    """What goes from layer to layer, a node of trees once it is registered."""

    x: Tensor
    layer: int = 0


class Opaque(State):
    """A leaf."""


torch.export.register_dataclass(State)


def _in_turn(make: Callable[[Tensor], Any], get: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    return lambda x, a, b: get(b(a(make(x))))


def _with_a_mask(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    mask = x.detach()[..., :1].sigmoid()
    return b(mask=mask, hidden=a(mask=mask, hidden=x))


def _with_booleans(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    mask = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) % 3 == 0
    return b(mask, a(mask, x))


def _two_streams(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
    first, second = b(*a(x, 2 * x))
    return first + second


def _plain(run: Callable[..., Tensor], x: Tensor) -> Tensor:
    return run(x)


GIVEN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a dict": (
        lambda run, state: {"scale": state["scale"] / 2, "x": run(state["x"]) * state["scale"]},
        _in_turn(lambda x: {"x": x, "scale": x.new_ones(())}, lambda state: state["x"]),
    ),
    "a dataclass": (
        lambda run, state: State(run(state.x), state.layer + 1),
        _in_turn(State, lambda state: state.x * state.layer),
    ),
    "a keyword": (lambda run, *, hidden: run(hidden), lambda x, a, b: b(hidden=a(hidden=x))),
    "tuples": (
        lambda run, x: (run(x), (x.mean(-1), x.square().mean(-1))),
        lambda x, a, b: sum(term.unsqueeze(-1) for term in a(x)[1]) + b(a(x)[0])[0],
    ),
    "a mask": (lambda run, *, mask, hidden: run(hidden) * mask, _with_a_mask),
    "booleans before": (lambda run, mask, x: run(x).masked_fill(mask.unsqueeze(-1), 0.5), _with_booleans),
    "two streams": (lambda run, x, y: (run(x + y), y + x.tanh()), _two_streams),
    "calls in parts": (_plain, lambda x, a, b: b(torch.cat([a(x[:2]), a(x[2:])]))),
    "a dataclass that is a leaf": (lambda run, state: Opaque(run(state.x)), _in_turn(Opaque, lambda state: state.x)),
}
AGAIN: dict[str, Callable[..., Any]] = {
    "in turn": lambda x, a, b: b(b(a(a(x)))),
    "the first": lambda x, a, b: a(b(a(x))),
    "at half the length": lambda x, a, b: b(a(x)).roll(4, 1) + b(a(a(x)[:, ::2])).repeat(1, 2, 1),
    "of anything": lambda x, a, b: b(a(x)) + a(2 * x) + a(b(x)),
    "minus the mean": lambda x, a, b: b(a(a(x) - a(x).mean(1, keepdim=True))),
}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("given", GIVEN)
@on_meshes({"fsdp": 1, "tp": 2})
def test_what_layers_are_given(mesh: DeviceMesh, given: str) -> None:
    model: Any = Through(*GIVEN[given]).double().eval()
    _require_like_one_rank(mesh, model, _policy(), _ids())
    assert len(found_of(model).scattered) == 4


@pytest.mark.parametrize("again", AGAIN)
@on_meshes({"fsdp": 1, "tp": 2})
def test_layers_that_are_called_again(mesh: DeviceMesh, again: str) -> None:
    model = Through(_plain, AGAIN[again]).double().eval()
    _require_like_one_rank(mesh, model, _policy(), _ids())


class Streams(Block):
    """Several streams [b, s, n, c], of which the block sees the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.mean(2)).unsqueeze(2) * torch.arange(x.shape[2], device=x.device)[:, None]


@on_meshes(*MESHES)
def test_several_streams_in_a_dim_of_their_own(mesh: DeviceMesh) -> None:
    model = _model(after=lambda hidden: hidden[-1].sum(2), before=lambda x: x if x.dim() == 4 else _four(x))
    model.layers = nn.ModuleList(Streams().double().eval() for _ in range(2))
    _require_like_one_rank(mesh, model, _policy(acts={"layers.*": "b s@tp? ..."}), _ids())
    assert len(found_of(model).scattered) == 4


def _four(x: Tensor) -> Tensor:
    return torch.stack([x, x.tanh(), 2 * x], 2)


class Rows(Block):
    """The feed-forward half without its norm, on any dims."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_rows_without_samples_stay_whole(mesh: DeviceMesh) -> None:
    """The second dim of [s, c] is that of features."""
    model = _model(before=lambda x: x.flatten(0, -2))
    model.layers = nn.ModuleList(Rows().double().eval() for _ in range(2))
    _require_like_one_rank(mesh, model, _policy(acts={"layers.*": "b s@tp? ..."}), _ids())
    assert not found_of(model).inputs


@pytest.mark.everyday(1)
def test_blocks_of_a_model_that_names_none_are_asked_for() -> None:
    model: Any = FAMILIES["Llama"].make()
    assert "model.layers.*" in sf.policies.from_transformers(model, sequence_parallel=True).acts
    model._no_split_modules = []
    with pytest.raises(sf.ShardError, match=r"LlamaForCausalLM names no blocks; say between which modules"):
        sf.policies.from_transformers(model, sequence_parallel=True)


class Convolved(Block):
    """Mixes positions by modules in a list, which is no module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList([nn.Conv1d(C, C, 3, padding=1, groups=C)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mixers[0](x.transpose(1, 2)).transpose(1, 2))


@on_meshes({"fsdp": 1, "tp": 2})
def test_layers_of_another_kind_stay_split(mesh: DeviceMesh) -> None:
    model = _model()
    model.layers = nn.ModuleList(cls().double().eval() for cls in (Convolved, Block, Convolved))
    _require_like_one_rank(mesh, model, _policy(), _ids())
    found = found_of(model)
    assert found.entries == {"layers.0.mixers.0", "layers.2.mixers.0"} and len(found.scattered) == 6


class Starting(Decoder):
    """Calls a module with positions, and with the first one alone, which has no dim of them."""

    def forward(self, ids: Tensor) -> Tensor:
        x, first = self.norm(self.emb(ids)), self.norm(self.emb(ids[:, 0]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first.unsqueeze(1))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_module_that_is_called_with_other_dims_too_gets_whole_inputs(mesh: DeviceMesh) -> None:
    """Nothing before it splits them: that its inputs are to be whole is all that another run can do better."""
    model = Starting().double().eval()
    _require_like_one_rank(mesh, model, _policy(acts=SPLIT | {"norm": "b s@tp c"}), _ids())
    found = found_of(model)
    assert "norm" in found.entries & found.whole and found.inputs


# -- with everything else ---------------------------------------------------------------------------------------------


@on_meshes({"fsdp": 2, "tp": 2})
def test_gradients_of_samples_are_clipped_as_on_one_rank(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids()
    params, local = sf.shard(model, mesh, _policy()), sf.data.local_batch(ids, mesh)

    def clipped(p: sf.Params, x: Tensor) -> sf.Params:
        return sf.optim.clip(sf.grad(lambda p: _loss(sf.apply(model, p, x[None])))(p), 0.5)[0]

    each = sf.vmap(clipped, in_dims=(None, 0))(params, local)
    found = sf.gather(sf.reduce_grads(sf.tree.map(lambda g: g.sum(0), each), op="sum", like=params))
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in ids:
        grads = torch.autograd.grad(_loss(model(x[None])), list(model.parameters()))
        factor = (0.5 / (torch.stack([g.norm() for g in grads]).norm() + 1e-6)).clamp(max=1)
        wanted = {name: wanted[name] + factor * g for name, g in _named(model, grads).items()}
    assert_parity({name: found[name] for name in wanted}, wanted, tol=1e-9)
    assert found_of(model).inputs


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_graph_is_as_on_one_rank(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids()
    params, local = sf.shard(model, mesh, _policy()), sf.data.local_batch(ids, mesh)
    step = sf.jit(sf.value_and_grad(lambda p, x: _loss(sf.apply(model, p, x))), backend="eager")
    for _ in range(2):
        _require_gradients_of_one_rank(model, ids, *step(params, local))
    assert found_of(model).inputs


@on_meshes({"fsdp": 2, "tp": 2})
def test_a_trainer_with_parts_of_batches_is_as_on_one_rank(mesh: DeviceMesh) -> None:
    model, reference = _model(), _model()
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
    trainer = sf.Trainer(
        model,
        mesh,
        _policy(),
        optimizer=sf.optim.adamw(**settings),
        loss_fn=lambda p, x: _loss(sf.apply(model, p, x)),
        clip=0.5,
        accumulate=2,
    )
    optimizer = torch.optim.AdamW(reference.parameters(), **settings)
    for _ in range(3):
        ids = _ids(8)
        optimizer.zero_grad()
        loss = _loss(reference(ids))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        found = trainer.step(sf.data.local_batch(ids, mesh))
        wanted = {"loss": loss.detach(), "norm": norm}
        assert_parity({"loss": found["loss"], "norm": found["grad_norm"]}, wanted, tol=1e-9)
    full, wanted = sf.gather(trainer.params), {name: p.detach() for name, p in reference.named_parameters()}
    assert_parity({name: full[name] for name in wanted}, wanted, tol=1e-9)


@on_meshes({"fsdp": 2, "tp": 2})
def test_parts_of_a_batch_add_up(mesh: DeviceMesh) -> None:
    model, ids = _model(), _ids(8)
    params, local = sf.shard(model, mesh, _policy()), sf.data.local_batch(ids, mesh)
    step = sf.value_and_grad(lambda p, x: _loss(sf.apply(model, p, x)), reduce=None)
    losses, grads = zip(*(step(params, part) for part in local.chunk(2)), strict=True)
    mean = sf.reduce_grads(sf.tree.map(lambda first, second: (first + second) / 2, *grads))
    loss = sf.collectives.pmean((losses[0] + losses[1]) / 2, mesh, "fsdp")
    _require_gradients_of_one_rank(model, ids, loss, mean)


PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-5),
    "bfloat16": ({"compute_dtype": torch.bfloat16}, 2e-2),
    "bfloat16, gathered once": ({"compute_dtype": torch.bfloat16, "regather": False}, 2e-2),
    "bfloat16 but for the loss": ({"compute_dtype": torch.bfloat16, "output_dtype": torch.float32}, 2e-2),
    "bfloat16 reductions": ({"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, 2e-2),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@on_meshes({"fsdp": 2, "tp": 2})
def test_precisions(mesh: DeviceMesh, precision: str) -> None:
    fields, tolerance = PRECISIONS[precision]
    model, ids = _model().float(), _ids()
    expected = torch.autograd.grad(_loss(model(ids)), list(model.parameters()))
    params, local = sf.shard(model, mesh, _policy(**fields)), sf.data.local_batch(ids, mesh)
    full = sf.gather(sf.grad(lambda p: _loss(sf.apply(model, p, local)))(params))
    off = torch.stack([(full[n] - g).norm() for n, g in _named(model, expected).items()]).norm()
    assert off <= tolerance * torch.stack([g.norm() for g in expected]).norm()
    assert all(x.dtype == torch.float32 for x in full.values()) and found_of(model).inputs


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2})
def test_lengths_that_do_not_divide_are_errors_on_every_rank(mesh: DeviceMesh) -> None:
    """Also where only one data rank has such a length; before anything else is sent."""
    for lengths in ((7, 7), (8, 7)):
        model = _model()
        params = sf.shard(model, mesh, _policy())
        ids = _ids(2, lengths[mesh.get_local_rank("fsdp")])
        match = r"7 over tp=2, 7 % 2 = 1\. Pad" if ids.shape[1] == 7 else "2 other ranks cannot use their inputs"
        with count_collectives() as counted, pytest.raises(sf.ShardError, match=match):
            sf.grad(lambda p, x, model=model: _loss(sf.apply(model, p, x)))(params, ids)
        assert counted.all_reduce == counted.reduce_scatter == 0


@on_meshes({"fsdp": 1, "tp": 2})
def test_generate_tells_of_single_tokens(mesh: DeviceMesh) -> None:
    model: Any = FAMILIES["Llama"].make()
    chosen = sf.policies.from_transformers(model)
    params = sf.shard(model, mesh, chosen | sf.Policy(acts={"model.layers.*": "b s@tp c"}))
    ids = FAMILIES["Llama"].batch()[1]
    with pytest.raises(sf.ShardError, match=r"1 over tp=2, .*write '@tp\?' to leave such inputs whole"):
        sf.apply(model, params, ids, method="generate", max_new_tokens=3, do_sample=False)
