"""`generate` on sharded trees: tokens as on one rank, weights gathered once, caches of this rank's heads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, Family
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.testing import count_collectives, on_meshes

MESHES = ({"fsdp": 4, "tp": 1}, {"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
LLAMA = FAMILIES["Llama"]
GROUPS = {"num_key_value_heads": 2}
LLAMAS = {
    "heads": LLAMA,
    "groups": replace(LLAMA, fields=LLAMA.fields | GROUPS),
    "groups, eager attention": replace(LLAMA, fields=LLAMA.fields | GROUPS | {"attn_implementation": "eager"}),
    "a query a rank": replace(LLAMA, fields=LLAMA.fields | GROUPS | {"num_attention_heads": 4, "head_dim": 4}),
}


def _family(name: str) -> Family:
    fields = {"decoder_start_token_id": 0} if name == "T5" else {"bos_token_id": 1}
    return replace(FAMILIES[name], fields=FAMILIES[name].fields | fields)


def _make(family: Family, mesh: DeviceMesh, **how: Any) -> tuple[Any, sf.Params]:
    model: Any = family.make()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    params = sf.shard(model, mesh, sf.policies.from_transformers(model, **how))
    return model, params


def _prompts(mesh: DeviceMesh, samples: int = 8) -> dict[str, Tensor]:
    ids = LLAMA.batch(samples)[1]
    return sf.data.local_batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, mesh)


def _assert_same_tokens(
    mesh: DeviceMesh, family: Family, prompts: dict[str, Tensor], sequence_parallel: bool = False, **options: Any
) -> None:
    model, params = _make(family, mesh, sequence_parallel=sequence_parallel)
    options |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(3)
    expected = model.generate(**prompts, **options)
    torch.manual_seed(3)
    found = sf.apply(model, params, **prompts, method="generate", **options)
    torch.testing.assert_close(found.sequences, expected.sequences, rtol=0, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)


LIKE_LLAMA = "Qwen2 Mistral Gemma Granite OLMo2 StarCoder2".split()  # caches, masks and positions are the same
CAUSAL = [name for name, family in FAMILIES.items() if "CausalLM" in family.model or name in ("GPT-2", "T5")]


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in LIKE_LLAMA])
@on_meshes({"fsdp": 2, "tp": 2})
def test_greedy_tokens_are_those_of_one_rank(mesh: DeviceMesh, name: str) -> None:
    _assert_same_tokens(mesh, _family(name), _prompts(mesh), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", ["Llama", "T5"])
@on_meshes({"fsdp": 2, "tp": 2})
def test_prompts_are_split_along_the_sequence_and_single_tokens_are_not(mesh: DeviceMesh, name: str) -> None:
    prompts = _prompts(mesh)
    _assert_same_tokens(mesh, _family(name), prompts, sequence_parallel=True, max_new_tokens=4, do_sample=False)


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "a static cache": {"cache_implementation": "static", "do_sample": False},
    "no cache": {"use_cache": False, "do_sample": False},
    "a prompt in chunks": {"prefill_chunk_size": 3, "do_sample": False},
}


@pytest.mark.one_mesh
@pytest.mark.parametrize("way", WAYS)
@on_meshes(*MESHES)
def test_ways_to_generate(mesh: DeviceMesh, way: str) -> None:
    llama = "groups" if mesh["tp"].size() > 1 else "heads"
    _assert_same_tokens(mesh, LLAMAS[llama], _prompts(mesh), max_new_tokens=5, **WAYS[way])


@on_meshes({"fsdp": 1, "tp": 4})
def test_keys_that_ranks_share_in_a_static_cache(mesh: DeviceMesh) -> None:
    """On one rank attention groups the queries of a token, and a rank that has one query of a group does not."""
    family, options = LLAMAS["a query a rank"], {"max_new_tokens": 5, **WAYS["a static cache"]}
    for way in ("sdpa", "eager"):
        of_way = replace(family, fields=family.fields | {"attn_implementation": way})
        _assert_same_tokens(mesh, of_way, _prompts(mesh), **options)


@pytest.mark.one_mesh
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "groups"])
@on_meshes({"fsdp": 2, "tp": 2}, {"fsdp": 1, "tp": 4})
def test_padded_prompts(mesh: DeviceMesh, name: str) -> None:
    prompts = _prompts(mesh)
    prompts["attention_mask"][1, :3] = 0
    _assert_same_tokens(mesh, LLAMAS.get(name) or _family(name), prompts, max_new_tokens=5, do_sample=False)


@on_meshes(*MESHES)
def test_data_ranks_stop_at_different_tokens(mesh: DeviceMesh) -> None:
    """Nobody waits for one that has stopped: neither here nor in what comes next."""
    model, params = _make(LLAMA, mesh)
    mine = _prompts(mesh, 4)
    rank, ranks = sf.data.rank(mesh)
    said = [model.generate(ids[None], max_new_tokens=8, do_sample=False)[0, 8:].tolist() for ids in LLAMA.batch(4)[1]]
    # The second token of the first data rank ends all; the others do not say it, or later.
    eos = said[0][1]
    mine = {name: x[:1] if rank == 0 else x for name, x in mine.items()}
    expected = model.generate(**mine, max_new_tokens=8, do_sample=False, eos_token_id=eos)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": eos}
            found = sf.apply(model, params, **mine, method="generate", **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    lengths: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lengths, found.shape[1])
    assert ranks == 1 or len(set(lengths)) > 1, "the prompts were chosen to stop at different lengths"
    ids = mine["input_ids"]
    loss, grads = sf.value_and_grad(lambda p: LLAMA.loss(sf.apply(model, p, ids), ids))(params)
    assert loss.isfinite() and list(grads) == list(params)


@on_meshes({"fsdp": 2, "tp": 2})
def test_ranks_of_a_compute_axis_draw_the_same_tokens(mesh: DeviceMesh) -> None:
    """They are those of the first of them, and afterwards each has its own numbers again."""
    model, params = _make(LLAMA, mesh)
    prompts = _prompts(mesh)
    options = {"max_new_tokens": 6, "do_sample": True}
    first = int(mesh.mesh[mesh.get_local_rank("fsdp"), 0])
    torch.manual_seed(first)
    expected = model.generate(**prompts, **options)
    after = torch.get_rng_state()
    torch.manual_seed(torch.distributed.get_rank())
    before = torch.get_rng_state()
    found = sf.apply(model, params, **prompts, method="generate", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), after if torch.distributed.get_rank() == first else before)


@on_meshes(*MESHES)
def test_weights_are_gathered_once_and_caches_hold_own_heads(mesh: DeviceMesh) -> None:
    model, params = _make(LLAMA, mesh)
    prompts = _prompts(mesh)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**prompts, max_new_tokens=8, **options)

    def generate(tokens: int) -> tuple[Any, dict[str, int]]:
        with count_collectives() as count:
            found = sf.apply(model, params, **prompts, method="generate", max_new_tokens=tokens, **options)
        return found, count.as_dict()

    generate(8)
    counts = [generate(tokens)[1] for tokens in (2, 4)]
    found, last = generate(8)
    counts.append(last)
    tp = mesh["tp"].size()
    assert found.past_key_values.layers[0].keys.shape == (8 // mesh["fsdp"].size(), 4 // tp, 15, 4)
    whole = expected.past_key_values.layers[1].values
    start = mesh.get_local_rank("tp") * (4 // tp)
    torch.testing.assert_close(found.past_key_values.layers[1].values, whole[:, start : start + 4 // tp])
    torch.testing.assert_close(found.logits, expected.logits)
    for kind, fewest in counts[0].items():
        a_token = {"all_reduce": 5, "all_gather": 1}.get(kind, 0) if tp > 1 else 0
        assert [count[kind] for count in counts] == [fewest, fewest + 2 * a_token, fewest + 6 * a_token], kind


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_conversation_goes_on_with_its_cache(mesh: DeviceMesh) -> None:
    model, params = _make(LLAMA, mesh)
    prompts = _prompts(mesh)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**prompts, **options)
    found = sf.apply(model, params, **prompts, method="generate", **options)
    more = torch.cat([expected.sequences, prompts["input_ids"]], 1)
    again = model.generate(more, past_key_values=expected.past_key_values, **options)
    other = sf.apply(model, params, more, method="generate", past_key_values=found.past_key_values, **options)
    torch.testing.assert_close(other.sequences, again.sequences, rtol=0, atol=0)


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_cache_given_to_a_forward_is_filled_by_it_alone(mesh: DeviceMesh) -> None:
    from transformers import DynamicCache

    model, params = _make(LLAMA, mesh)
    ids = _prompts(mesh)["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        first = sf.apply(model, params, ids[:, :5], past_key_values=cache).logits
        second = sf.apply(model, params, ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, second], 1), model(ids).logits.detach())


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_cache_that_one_process_has_filled_is_refused(mesh: DeviceMesh) -> None:
    """It holds all heads, and nothing in it says so."""
    model, params = _make(LLAMA, mesh)
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(**_prompts(mesh), **options)
    with pytest.raises(sf.ShardError, match="gets a cache that is filled already"):
        sf.apply(model, params, whole.sequences, method="generate", past_key_values=whole.past_key_values, **options)


class Remembering(nn.Module):
    def __init__(self) -> None:
        from transformers import DynamicCache

        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.cache: Any = DynamicCache()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        k, v = self.cache.update(k, v, 0)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 1, "tp": 2})
def test_a_cache_that_a_model_holds_keeps_heads_of_this_rank_and_is_not_gone_on_with(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, own = Remembering(), Remembering()
    own.load_state_dict(model.state_dict())
    rules = {"{q,k,v}.weight": "(h@tp d) c@fsdp", "o.weight": "c@fsdp (h@tp d)"}
    params, x = sf.shard(model, mesh, sf.Policy(rules=rules, sizes={"d": 2})), torch.randn(1, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(sf.apply(model, params, x), own(x))
        assert model.cache.layers[0].keys.shape == (1, 2, 4, 2)
        with pytest.raises(sf.ShardError):
            sf.apply(model, params, x)


class Counter(nn.Module):
    """Says the same until its sum is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() + 1
        return x

    @torch.no_grad()
    def generate(self, x: Tensor, limit: float) -> tuple[Tensor, int]:
        steps = 0
        while x.sum() < limit:
            x, steps = x + self(x), steps + 1
        return x, steps

    sample = generate  # a user's name for it


@pytest.mark.everyday(1)
@on_meshes({"fsdp": 2, "tp": 2})
def test_a_loop_of_another_name_is_an_error_that_says_which_to_take(mesh: DeviceMesh) -> None:
    model = Counter()
    policy = sf.Policy(rules={"layers.0.weight": "ff@tp c@fsdp", "layers.1.weight": "c@fsdp ff@tp"})
    with pytest.raises(sf.ShardError, match=r"name it 'generate' \(generate = sample, in its class\)"):
        sf.apply(model, sf.shard(model, mesh, policy), torch.ones(2, 4), 50.0, method="sample")


@pytest.mark.everyday(1)
@on_meshes(*MESHES)
def test_a_loop_of_a_users_own_model(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Counter().double()
    policy = sf.Policy(rules={"layers.0.weight": "ff@tp c@fsdp", "layers.1.weight": "c@fsdp ff@tp"})
    params = sf.shard(model, mesh, policy)
    index = sf.data.rank(mesh)[0]
    x = torch.ones(2, 4, dtype=torch.float64)
    limit = 50.0 * (1 + index)  # other data ranks go on for longer
    expected, steps = model.generate(x, limit)
    found, taken = sf.apply(model, params, x, limit, method="generate")
    torch.testing.assert_close(found, expected)
    assert taken == steps and steps > 2


@on_meshes({"fsdp": 2, "tp": 2})
def test_what_cannot_be_generated(mesh: DeviceMesh) -> None:
    model, params = _make(LLAMA, mesh)
    prompts = _prompts(mesh)

    def generate(params: sf.Params, of: nn.Module = model, /, **inputs: Any) -> Tensor:
        return sf.apply(of, params, **inputs, method="generate", max_new_tokens=2, do_sample=False)

    with pytest.raises(sf.ShardError, match=r"inputs differ between ranks along 'tp'"):
        generate(params, input_ids=prompts["input_ids"] + mesh.get_local_rank("tp"))
    with pytest.raises(sf.ShardError, match=r"'generate' goes on until its tokens say so"):
        sf.vmap(lambda ids: generate(params, input_ids=ids))(prompts["input_ids"][:, None])
    policy = sf.policies.from_transformers(model)
    unpadded = sf.Policy(**{name: getattr(policy, name) for name in policy.given - {"pad"}})
    stays_split = sf.shard(model, mesh, unpadded | sf.Policy(acts={"lm_head": "b s vocab@tp"}))
    with pytest.raises(sf.ShardError, match=r"needs whole outputs of the model, and one stays split by Policy\(acts"):
        generate(stays_split, **prompts)
    with sf.simulate(fsdp=1, tp=2) as other, pytest.raises(sf.ShardError, match=r"or simulated mesh can follow"):
        generate(sf.shard(model, other, policy), input_ids=LLAMA.batch()[1])
    drops, dropping = _make(_family("GPT-2"), mesh)
    with sf.data.dropout_seed(1), pytest.raises(sf.ShardError, match=r"call model.eval\(\)"):
        generate(dropping, drops.train(), **prompts)
