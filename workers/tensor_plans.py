"""Tensor-parallel plans for models that transformers has none for, in its own terms."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
PLANS: Mapping[str, Mapping[str, str]] = {
    # each head has a sink, which the layer reads itself
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn": "local_params",
    },
    "qwen3_vl_text": {**_ATTENTION, **_MLP},
    "gpt2": {  # by ways of ours; see `conv1d_sharing`
        "h.*.attn": "gpt2_heads",
        "h.*.attn.c_attn": "conv1d_by_heads",
        "h.*.attn.c_proj": "conv1d_by_inputs",
        "h.*.mlp.c_fc": "conv1d_by_outputs",
        "h.*.mlp.c_proj": "conv1d_by_inputs",
    },
}
"""Our plans, by the type of the language model."""
WHOLE_EXPERTS = frozenset({"gpt_oss"})
"""Models whose experts go to the ranks whole, by transformers' plan for that: cut into parts, each
rank would add the bias of an expert's output."""


def add_plan(config: "PreTrainedConfig") -> None:
    """Give a configuration our plan, if transformers has none for it and the plan's ways to cut."""
    text_config: Any = config.get_text_config()  # on classes, plans are class variables
    if not text_config.base_model_tp_plan and text_config.model_type in PLANS:
        if text_config.model_type == "gpt2" and not _can_cut_conv1d():
            return
        text_config.base_model_tp_plan = dict(PLANS[text_config.model_type])


def _can_cut_conv1d() -> bool:
    """Make our ways to cut gpt2's layers known to transformers; returns whether this
    version can have them."""
    try:
        from workers import conv1d_sharing  # needs torch, and plans have to be without
    except ImportError:  # transformers 5.17, for one, shares layers by other classes
        return False
    conv1d_sharing.register()
    return True


def has_whole_experts(config: "PreTrainedConfig") -> bool:
    """Whether ranks share the model's experts whole."""
    return config.get_text_config().model_type in WHOLE_EXPERTS
