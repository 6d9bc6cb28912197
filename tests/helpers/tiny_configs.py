"""A tiny model, with random weights, of every model type of transformers that comes with a tensor-parallel plan."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

VOCAB = 96

# Given to each configuration that has the field.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    # compressed keys and values
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 4,
    # layers with a state
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "num_nextn_predict_layers": 0,
}

_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_FIRST = {"mlp_only_layers": [0]}
_OWN_KEYS = {"num_key_value_heads": 4}  # a key and a value for each head of the queries
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {key: SMALL[key] for key in ("vocab_size", "num_key_value_heads", "head_dim", "pad_token_id")} | _TOWER
_MUSE_VISION = _TOWER | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16}
_MUSE_VISION |= {"layer_types": ["window_attention", "full_attention"]}
_MUSE = {"out_hidden_size": 128, "projector_hidden_size": 32, "image_token_id": 2, "video_token_id": 1}
_MUSE_MOE = {"moe_hidden_size": 32, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
_MUSE_MOE |= {"mlp_layer_types": ["dense", "sparse"]}
_LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 4,
    "interleave_moe_layer_step": 2,
}
_LLAMA4_VISION = {
    "image_size": 16,
    "patch_size": 4,
    "intermediate_size": 128,  # four patches of 32 become one
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}

# Given to one configuration besides, whether or not it declares the field. Where a family mixes kinds of layers, so do
# its two: a window and the whole sequence, a state and attention, a dense layer and one with experts.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afmoe": _SLIDING | {"num_dense_layers": 1},
    "axk1": _OWN_KEYS,
    "axk2": _OWN_KEYS,
    "bailing_hybrid": _OWN_KEYS | _LINEAR | {"num_mtp_layers": 0},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2": _SLIDING,
    "cohere2_moe": _SLIDING | {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": _SLIDING | {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "cosmos3_edge_text": _MROPE,
    "deepseek_ocr2_encoder": _OWN_KEYS,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": _OWN_KEYS,
    "deepseek_v3": _OWN_KEYS,
    "deepseek_v32": _OWN_KEYS,
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "diffusion_gemma_text": {"global_head_dim": 16, "top_k_experts": 2},
    "dots1": _SLIDING,
    "dots3_note_text": _OWN_KEYS
    | {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "dots3_note_vision_encoder": {
        "patch_size": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "embedding_gemma2_text": {"global_head_dim": 16},  # whose full attention has one key head, as released
    "ernie4_5_vl_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}, "moe_intermediate_size": [16, 8]},
    "ernie4_5_vl_moe_vision": {"depth": 2, "num_heads": 4, "patch_size": 4},
    "esmc": _OWN_KEYS,
    "exaone4": _SLIDING,
    "exaone_moe": _SLIDING,
    "flint": _SLIDING,
    "gemma3_text": _SLIDING,
    "gemma3n_text": {  # the last two layers use the keys and values of the first two
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_vision": _OWN_KEYS | {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16},
    "glm4_moe_lite": _OWN_KEYS,
    "glm4v_moe_text": _MROPE | {"head_dim": 16},
    "glm4v_text": _MROPE | {"head_dim": 16},
    "glm5_next_text": _OWN_KEYS
    | {
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_kpool": 2,
    },
    "glm_image_text": _MROPE | {"head_dim": 16},
    "glm_moe_dsa": _OWN_KEYS,
    "glm_ocr_text": _MROPE | {"head_dim": 16},
    "granitemoehybrid": _LINEAR,
    "higgs_audio_v2": {"num_codebooks": 2, "codebook_size": VOCAB // 2, "audio_token_id": 2, "audio_delay_token_id": 1},
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 4,
        "d_rel": 4,
        "rel_extent": 16,
        "unpadded_vocab_size": VOCAB,
    },
    "inkling_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 4,
        "d_rel": 4,
        "rel_extent": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": _OWN_KEYS | _LINEAR | {"linear_head_dim": 8, "linear_num_heads": 4},
    "kolibri1": _SLIDING,
    "laguna": _SLIDING,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": _TEXT | _LLAMA4, "vision_config": _TOWER | _LLAMA4_VISION, "image_token_index": 2},
    "llama4_text": _LLAMA4,
    "llama4_vision_model": _LLAMA4_VISION,
    "longcat_flash": _OWN_KEYS
    | {"num_layers": 2, "head_dim": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "mellum": _SLIDING | {"mlp_layer_types": ["dense", "sparse"]},
    "minicpm3": _OWN_KEYS,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "dense_intermediate_size": 64,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "ministral": _SLIDING,
    "mistral4": _OWN_KEYS,
    "mistral_large4_text": _OWN_KEYS,
    "muse_glimmer": _MUSE | {"text_config": _TEXT, "vision_config": _MUSE_VISION},
    "muse_glimmer_assistant": {  # a sliding window needs a cache that the target model has filled
        "target_layer_ids": [0, 1],
        "layer_types": ["full_attention", "full_attention"],
    },
    "muse_glimmer_vision": _MUSE_VISION,
    "muse_spark": _MUSE
    | {
        "text_config": _TEXT | _MUSE_MOE,
        "vision_config": _MUSE_VISION,
        "audio_config": {
            "patch_sizes": [2, 2],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
        "audio_token_id": 0,
    },
    "muse_spark_text": _MUSE_MOE,
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "neomme": _SLIDING
    | {
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE | {"partial_rotary_factor": 0.5}},
        "image_token_id": 2,
        "document_token_id": 1,
        "embedding_rank": 16,
        "patch_size": 4,
        "embedding_dim": 16,
    },
    "olmo3": _SLIDING,
    "paddleocr_vl_text": _MROPE,
    "phi4_multimodal": {
        "vision_config": _TOWER | {"image_size": 16, "crop_size": 16, "patch_size": 4, "image_token_id": 90},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "input_size": 16,
            "nemo_conv_channels": 32,
            "audio_token_id": 91,
        },
    },
    "phimoe": {"router_jitter_noise": 0.5},  # experts whose score is as close as this get a gradient
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_moe": _DENSE_FIRST,
    "qwen2_vl_text": _MROPE,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": _DENSE_FIRST,
    "qwen3_next": _LINEAR | _DENSE_FIRST,
    "qwen3_omni_moe_talker_code_predictor": {"num_code_groups": 3},
    "qwen3_omni_moe_talker_text": _MROPE | {"shared_expert_intermediate_size": 32},
    "qwen3_omni_moe_text": _MROPE | _DENSE_FIRST,
    "qwen3_vl_moe_text": _MROPE | _DENSE_FIRST,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "step3p5": _SLIDING | {"mlp_layer_types": ["dense", "sparse"], "share_expert_dim": 16},
    "t5_gemma_module": {"dropout_rate": 0.0},
    "t5gemma2_decoder": _SLIDING | {"dropout_rate": 0.0},
    "t5gemma2_text": _SLIDING | {"dropout_rate": 0.0},
    "ultrabert": _SLIDING,
    "youtu": _OWN_KEYS,
}

# Where the class is neither the causal language model nor the base model of the Auto classes.
CLASSES: dict[str, str] = {
    "deepseek_ocr2_encoder": "DeepseekOcr2VisionEncoder",
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "diffusion_gemma_text": "DiffusionGemmaEncoderTextModel",
    "dots3_note_vision_encoder": "Dots3NoteVisionModel",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "granite4_vision_text": "Granite4VisionTextModel",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_vision_model": "Llama4VisionModel",
    "mistral4": "Mistral4ForCausalLM",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeTalkerCodePredictorModel",
    "qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
    "t5_gemma_module": "T5GemmaEncoder",
    "t5gemma2_decoder": "T5Gemma2Decoder",
    "t5gemma2_text": "T5Gemma2TextEncoder",
    "unlimited_ocr_text": "UnlimitedOcrTextModel",
}

# Model types with a plan of which no model can be made.
NO_MODEL: dict[str, str] = {}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _packed(patch: int, name: str = "pixel_values") -> Callable[[Tensor], dict[str, Any]]:
    """Images of 4 x 4 patches of so many numbers, one after the other."""
    return lambda ids: {name: _random(len(ids) * 16, patch), "grid_thw": torch.tensor([[1, 4, 4]] * len(ids))}


def _placed(ids: Tensor) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    return {"pixel_values": _random(len(ids), 16, 48), "pixel_position_ids": places.repeat(len(ids), 1, 1)}


def _placeholders(ids: Tensor, *tokens: int) -> Tensor:
    """Token ids with places in front for what another modality gives; the ids 0, 1 and 2 are in no text."""
    return torch.cat([torch.tensor([tokens] * len(ids)), ids], 1)


def _sung(ids: Tensor) -> dict[str, Any]:
    codes = torch.randint(0, VOCAB // 2, (len(ids), 4, 2), generator=torch.Generator().manual_seed(2))
    return {"input_ids": torch.cat([ids[:, :4], torch.full_like(ids[:, :4], 2)], 1), "audio_input_ids": codes}


# Where the inputs are not token ids alone. The muse models and phi4_multimodal get no images, though they see: into how
# many pieces an image is cut they read from the values of a tensor.
INPUTS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "deepseek_ocr2_encoder": lambda ids: {"inputs_embeds": _random(len(ids), 8, 32), "num_patches": 4},
    "dots3_note_vision_encoder": _packed(48),
    "ernie4_5_vl_moe_vision": _packed(48, "hidden_states"),
    "gemma4_vision": _placed,
    "higgs_audio_v2": _sung,
    "llama4": lambda ids: {"input_ids": _placeholders(ids, 2, 2, 2, 2), "pixel_values": _random(len(ids), 3, 16, 16)},
    "llama4_vision_model": lambda ids: {"pixel_values": _random(len(ids), 3, 16, 16)},
    "muse_glimmer_assistant": lambda ids: {
        "noise_embeds": _random(len(ids), 4, 32),
        "context_hidden_states": _random(len(ids), 8, 64),
    },
    "muse_glimmer_vision": _packed(96),
    "muse_spark": lambda ids: {"input_ids": _placeholders(ids, 0, 0), "input_values": _random(len(ids), 8)},
    "neomme": lambda ids: {"input_ids": _placeholders(ids, 2, 2, 2, 2), "pixel_values": _random(len(ids) * 4, 48)},
    "qwen3_omni_moe_talker_code_predictor": lambda ids: {"inputs_embeds": _random(len(ids), 8, 32)},
    "qwen3_omni_moe_talker_text": lambda ids: {"inputs_embeds": _random(len(ids), 8, 32)},
    "t5gemma2_decoder": lambda ids: {"input_ids": ids, "encoder_hidden_states": _random(len(ids), 8, 32)},
    "voxtral_realtime_text": lambda ids: {"input_ids": ids, "t_cond": _random(len(ids), 1, 32)},
}


def names() -> list[str]:
    """The model types whose configuration class has a tensor-parallel plan."""
    return [name for name, config in CONFIG_MAPPING.items() if getattr(config, "base_model_tp_plan", None)]


def _declared(config: type) -> set[str]:
    return {name for base in inspect.getmro(config) for name in getattr(base, "__annotations__", {})}


def config(model_type: str) -> Any:
    """The tiny configuration of a model type."""
    made: Any = CONFIG_MAPPING[model_type]
    declared = _declared(made)
    fields = {name: value for name, value in SMALL.items() if name in declared}
    fields |= OVERRIDES.get(model_type, {})
    return made(**fields, experts_implementation="eager")


def model_class(model_type: str) -> type[nn.Module]:
    """The causal language model if there is one, else the base model, else what CLASSES names."""
    name = CLASSES.get(model_type) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    name = name or MODEL_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError(f"model_class: no class is known for {model_type!r}; name it in CLASSES")
    if hasattr(transformers, name):
        return getattr(transformers, name)
    module = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(module), name)


def make(model_type: str) -> nn.Module:
    """The model in float64 and in eval mode, the same on every rank; no parameter is all 0 or all 1.

    Every matrix is drawn here: a few models leave some of theirs as the memory was.
    """
    torch.manual_seed(0)
    model = model_class(model_type)(config(model_type)).double().eval()
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


def batch(model_type: str, size: int = 4) -> tuple[dict[str, Any], Tensor]:
    """Inputs, whose dim 0 is that of the samples or so many times as long, and token ids [b, s]."""
    ids = torch.randint(3, VOCAB, (size, 8), generator=torch.Generator().manual_seed(1))
    return INPUTS.get(model_type, lambda ids: {"input_ids": ids})(ids), ids


def loss(model_type: str, out: Any, ids: Tensor) -> Tensor:
    """A mean over the samples: the next token where there are logits, else a fixed projection of the first output."""
    if getattr(out, "logits", None) is not None:
        logits = out.logits[:, -ids.shape[1] :]  # without those of an image in front
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    pooled = getattr(out, "pooler_output", None)
    rows = (out[0] if pooled is None else pooled).reshape(len(ids), -1)
    fixed = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (rows * fixed).mean()
