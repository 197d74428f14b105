"""Arguments of the configs of tiny models, by family."""

VOCAB_SIZE = 97
MAX_POSITION = 256


COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNGROUPED = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Windows are shorter than the test's sequences, so that they matter.
SUPPORTED = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": ("Qwen3Config", {**COMMON, "head_dim": 16}),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": 5}),
    "gemma2": ("Gemma2Config", {**COMMON, "head_dim": 8, "sliding_window": 5}),
    "gemma3": ("Gemma3TextConfig", {**COMMON, "head_dim": 8, "sliding_window": 5}),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "sliding_window": 6}),
    "phi3": ("Phi3Config", COMMON),
    "olmo2": ("Olmo2Config", COMMON),
    "starcoder2": ("Starcoder2Config", {**COMMON, "sliding_window": 6}),
    "gpt2": ("GPT2Config", _GPT2),
    "opt": (
        "OPTConfig",
        {
            **{key: value for key, value in UNGROUPED.items() if key != "intermediate_size"},
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", UNGROUPED),
    "gpt_oss": (
        "GptOssConfig",
        {
            **COMMON,
            "head_dim": 8,
            "num_local_experts": 4,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "cohere": ("CohereConfig", COMMON),
    "granite": ("GraniteConfig", COMMON),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "smollm3": ("SmolLM3Config", COMMON),
}
_DELTA_NET = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LLAMA4 = {
    **COMMON,
    **_EXPERTS,
    "intermediate_size_mlp": 64,
    "head_dim": 8,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 8,
    "floor_scale": 4,  # shorter than the test's sequences too
    "attn_scale": 0.5,
}
# Served too, with parts that others lack.
RARE = {
    "mpt": (
        "MptConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 48,
            "n_heads": 6,  # no power of two, of which slopes are made in another way
            "n_layers": 3,
            "max_seq_len": MAX_POSITION,
            "attn_config": {"clip_qkv": 2.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**COMMON, **_EXPERTS, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **COMMON,
            **_EXPERTS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "phimoe": ("PhimoeConfig", {**COMMON, **_EXPERTS, "sliding_window": MAX_POSITION}),
    "olmoe": ("OlmoeConfig", {**COMMON, **_EXPERTS}),
    "llama4": ("Llama4TextConfig", _LLAMA4),
}
# Served too, with layers that keep a recurrent state.
RECURRENT = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **COMMON,
            **_EXPERTS,
            **_DELTA_NET,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**COMMON, **_DELTA_NET}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **COMMON,
            **_EXPERTS,
            **_DELTA_NET,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "lfm2": ("Lfm2Config", {**COMMON, "layer_types": ["conv", "full_attention", "conv"]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **COMMON,
            **_EXPERTS,
            **_MAMBA,
            "shared_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "bamba": ("BambaConfig", {**COMMON, **_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", {**COMMON, **_MAMBA, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **COMMON,
            "head_dim": 8,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "num_hidden_layers": 4,
            "ssm_state_size": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            **COMMON,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **COMMON,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
_QWEN_PLACEHOLDERS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE_OF_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
# Language models in multimodal wrappers; arguments and changes are those of the language model.
WRAPPED = {
    "mistral3": (
        "Mistral3Config",
        {**COMMON, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {"vision_config": {**_VISION, "model_type": "pixtral"}, "image_token_index": 90},
    ),
    "llava": (
        "LlavaConfig",
        {**COMMON, "model_type": "llama"},
        {"vision_config": {**_VISION, "model_type": "clip_vision_model"}, "image_token_index": 90},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {**COMMON, "rope_parameters": _ROPE_OF_THREE_AXES},
        {"vision_config": _QWEN_VISION, **_QWEN_PLACEHOLDERS},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {**COMMON, "head_dim": 8, "rope_parameters": _ROPE_OF_THREE_AXES},
        {
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            **_QWEN_PLACEHOLDERS,
        },
    ),
    "llama4_wrapper": (
        "Llama4Config",
        _LLAMA4,
        {
            "vision_config": {
                **_VISION,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 90,
        },
    ),
    "gemma3_wrapper": (
        "Gemma3Config",
        {**COMMON, "head_dim": 8, "sliding_window": 5},
        {
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
    ),
}
SERVED = {**SUPPORTED, **RARE, **RECURRENT, **WRAPPED}
