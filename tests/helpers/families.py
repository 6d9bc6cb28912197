"""Tiny models of the families that people use, with random weights, and batches for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB = 96
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = _BASE | {"num_attention_heads": 4, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES = _TOWER | {"image_size": 16, "patch_size": 4}


def _language(logits: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _tokens(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids}


@dataclass(frozen=True)
class Family:
    """A model class, its configuration, its inputs, and a mean loss over the samples of a batch."""

    model: str
    config: str
    fields: dict[str, Any] = field(default_factory=lambda: dict(_BASE))
    inputs: Callable[[Tensor], dict[str, Tensor]] = _tokens
    loss: Callable[[Any, Tensor], Tensor] = lambda out, ids: _language(out.logits, ids)

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.fields)
        return getattr(transformers, self.model)(config).to(dtype).eval()

    def logits(self, out: Any) -> dict[str, Tensor]:
        """What a model returns for each sample, [b, ...]: logits, or the embeddings of CLIP."""
        names = ("logits",) if hasattr(out, "logits") else ("text_embeds", "image_embeds")
        return {name: getattr(out, name) for name in names}

    def batch(self, size: int = 4) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and token ids [b, s]."""
        ids = torch.randint(3, VOCAB, (size, 8), generator=torch.Generator().manual_seed(1))
        return self.inputs(ids), ids


def _pixels(ids: Tensor) -> dict[str, Tensor]:
    made = torch.randn(len(ids), 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return {"pixel_values": made}


def _causal(name: str, **fields: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", _BASE | fields)


FAMILIES = {
    "Llama": _causal("Llama"),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", **_HEADS),
    "Mistral": _causal("Mistral"),
    "Gemma": _causal("Gemma", **_HEADS),
    "Gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _HEADS | {"sliding_window": 8}),
    "Phi3": _causal("Phi3"),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 2},
    ),
    "GPT-NeoX": _causal("GPTNeoX"),
    "OPT": _causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "BLOOM": Family(
        "BloomForCausalLM", "BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "Granite": _causal("Granite"),
    "OLMo2": _causal("Olmo2"),
    "Cohere": _causal("Cohere"),
    "StarCoder2": _causal("Starcoder2"),
    "DeepSeek-V3": _causal(
        "DeepseekV3",
        **_EXPERTS,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=8,
    ),
    "LongCat-Flash": Family(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "head_dim": 4,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 16,
            "max_position_embeddings": 64,
            "experts_implementation": "eager",
            "pad_token_id": 0,
        },
    ),
    "Mixtral": _causal("Mixtral", **_EXPERTS, num_local_experts=4),
    "Qwen3-MoE": _causal("Qwen3Moe", **_HEADS, **_EXPERTS, moe_intermediate_size=16, num_experts=8),
    "BERT": Family(
        "BertForMaskedLM",
        "BertConfig",
        _TOWER | {"vocab_size": VOCAB},
        loss=lambda out, ids: F.cross_entropy(out.logits.flatten(0, 1), ids.flatten()),
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        _IMAGES | {"num_labels": 8},
        _pixels,
        lambda out, ids: F.cross_entropy(out.logits, ids[:, 0] % 8),
    ),
    "CLIP": Family(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": _TOWER | {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 1},
            "vision_config": dict(_IMAGES),
            "projection_dim": 16,
        },
        lambda ids: _pixels(ids) | {"input_ids": torch.cat([ids, torch.ones_like(ids[:, :1])], 1)},
        lambda out, ids: (out.text_embeds * out.image_embeds).mean() + out.text_embeds[:, :3].square().mean(),
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        lambda ids: {"input_ids": ids, "decoder_input_ids": ids.flip(1)},
    ),
}


class InDouble(TorchFunctionMode):
    """Computes in float64 what a model computes in float32 whatever it is given: norms, softmax, routing.

    Rounding to float32 in the middle of a forward would hide a wrong number behind 1e-8.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        of_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if name == "float" and args and isinstance(args[0], Tensor):
            return args[0].double()
        if of_double and torch.float32 in (*args[1:], *(kwargs or {}).values()):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if v is torch.float32 else v for key, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))
