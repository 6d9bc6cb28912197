"""Activations split along the sequence between modules: numbers as on one rank, counts, bytes kept, refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, InDouble
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.core.apply import _RECORDS
from shardfn.core.tensor_parallel import Adjustments
from shardfn.testing import assert_parity, count_collectives, on_meshes, run

MESHES = ({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
SPLIT = {"layers.*": "b s@tp c"}
VOCAB, C, HEAD_DIM = 24, 16, 4


def _adjustments(model: nn.Module) -> Adjustments:
    """What the one run without data of a model found."""
    (found,) = _RECORDS[model][0].adjustments.values()
    return found


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
    "Llama Qwen3 Gemma3 Phi3 GPT-2 GPT-NeoX OPT BLOOM Granite OLMo2 Cohere StarCoder2 DeepSeek-V3 LongCat-Flash "
    "Mixtral Qwen3-MoE BERT T5"
).split()


@pytest.mark.parametrize("name", [*SPLIT_FAMILIES, "ViT", "ViT, 26 positions", "CLIP"])
@on_meshes(*MESHES)
def test_a_family_is_as_on_one_rank(mesh: DeviceMesh, name: str) -> None:
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
    found = _adjustments(model)
    splits = name in SPLIT_FAMILIES or (name == "ViT, 26 positions" and mesh["tp"].size() == 2)
    assert bool(found.inputs) == splits, "left whole by '?' where the positions do not divide"


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


def _require_like_one_rank(
    mesh: DeviceMesh, model: nn.Module, policy: sf.Policy, ids: Tensor, tol: float = 1e-9
) -> None:
    reference = _loss(model(ids))
    expected = torch.autograd.grad(reference, list(model.parameters()), materialize_grads=True)
    params, local = sf.shard(model, mesh, policy), sf.data.local_batch(ids, mesh)
    loss, grads = sf.value_and_grad(lambda p: _loss(sf.apply(model, p, local)))(params)
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
@on_meshes(*MESHES)
def test_what_is_made_of_split_activations_is_as_on_one_rank(mesh: DeviceMesh, after: str) -> None:
    model = _model(after=AFTER[after])
    _require_like_one_rank(mesh, model, _policy(), _ids())
    assert _adjustments(model).inputs, "activations are split"


@pytest.mark.parametrize(("samples", "length"), [(4, 4), (4, 8), (8, 8), (4, 16), (16, 4)])
@on_meshes(*MESHES)
def test_sizes_that_are_alike_are_told_apart(mesh: DeviceMesh, samples: int, length: int) -> None:
    """As many positions as samples, features or ranks: with 4 on 4 ranks each has one, which broadcasts."""
    model = _model()
    _require_like_one_rank(mesh, model, _policy(), _ids(samples, length))
    assert len(_adjustments(model).scattered) == 4


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


@pytest.mark.parametrize("before", _EVENS)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_block_that_mixes_positions_is_as_on_one_rank(mesh: DeviceMesh, before: str) -> None:
    """What a rank would compute otherwise from its positions is found, and the block gets them all."""

    class Mixing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_EVENS[before](x))

    model = _model()
    model.layers = nn.ModuleList(Mixing().double().eval() for _ in range(2))
    _require_like_one_rank(mesh, model, _policy(), _ids())
    found = _adjustments(model)
    assert found.inputs and bool(found.entries) == (before != "written in place")


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
        assert "asks for a value that is another one on one rank" in str(problem)


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
        packed = x.activation._own if hasattr(x, "activation") else getattr(x, "tensor", None)
        own = x if isinstance(x, Tensor) else packed
        if own is not None and own.numel():
            seen[own.untyped_storage().data_ptr()] = own.untyped_storage().nbytes()
        return x

    ids = torch.randint(3, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    weights = {x.to_local().untyped_storage().data_ptr() for x in params.values()}
    patch = pytest.MonkeyPatch()
    made = saved_tensors_hooks
    patch.setattr(
        "shardfn.core.engine.session.saved_tensors_hooks", lambda pack, unpack: made(lambda x: kept(pack(x)), unpack)
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


@on_meshes({"fsdp": 1, "tp": 2})
def test_checkpoints(mesh: DeviceMesh) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = _model()
    model.layers = nn.ModuleList(Checkpointed().double().eval() for _ in range(2))
    _require_like_one_rank(mesh, model, _policy(), _ids())


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_plan_of_torch(mesh: DeviceMesh) -> None:
    """The usual one for a decoder."""

    def plan() -> dict[str, Any]:
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

    model, ids = _model(), _ids()
    policy = sf.policies.from_parallelize_plan(plan())
    _require_like_one_rank(mesh, model, policy, ids)
    assert _adjustments(model).scattered


class Writing(Attention):
    """Changes what it was given after the first linear has read it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x)
        x.mul_(2)
        return self.wo(q + self.wk(x) + self.wv(x))


@on_meshes({"fsdp": 1, "tp": 2})
def test_a_gathered_activation_that_is_written_is_an_error(mesh: DeviceMesh) -> None:
    """As it is on one rank."""
    model, ids = _model(), _ids()
    for layer in model.layers:
        layer.attn = Writing().double()
    params = sf.shard(model, mesh, _policy())
    with pytest.raises(sf.ShardError, match=r"attn.wk.*modified inplace"):  # by the run without data
        sf.grad(lambda p: _loss(sf.apply(model, p, ids)))(params)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _loss(model(ids)).backward()
