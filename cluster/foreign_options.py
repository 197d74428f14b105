"""Options as vLLM and SGLang have them, and what is written here in their place."""

from collections.abc import Iterable, Mapping

from cluster.option_errors import nearest

NAMES: Mapping[str, str] = {
    "data_parallel_size": "num_target_groups",
    "draft_model": "draft",
    "draft_model_path": "draft",
    "enable_prefix_caching": "prefix_caching",
    "gpu_memory_utilization": "kv_cache_gib",
    "host": "http_host",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "kv_cache_gib",
    "method": "drafter",
    "model": "target",
    "model_path": "target",
    "num_draft_tokens": "gamma",
    "port": "http_port",
    "speculative_algorithm": "drafter",
    "speculative_draft_model_path": "draft",
    "speculative_model": "draft",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}
"""Names that have another one here."""
OF_REQUESTS = "requests have it as a field"
ADVICE: Mapping[str, str] = {
    "api_key": "name keys in the environment, TANDEM_API_KEYS=<key>, or give api_keys_file=<a "
    "file of them>",
    "config": "a file of options is served by `serve run <file>`",
    "disable_log_requests": "write request_log=off",
    "enable_auto_tool_choice": "calls of tools are found without it, as tool_call_parser says",
    "enable_lora": "adapters (LoRA) are not served",
    "enforce_eager": "write compile=off",
    "kv_cache_dtype": "the KV cache has the precision that dtype says",
    "load_format": "the model's folder says what its weights are",
    "max_tokens": OF_REQUESTS,
    "no_enable_prefix_caching": "write prefix_caching=off",
    "pipeline_parallel_size": "layers are not divided; tensor_parallel_size divides each, over "
    "nodes too",
    "rope_scaling": "it stands in the model's config.json",
    "seed": OF_REQUESTS,
    "speculative_config": "write its parts: draft=<a model>, drafter=<what drafts> and gamma=<how "
    "many tokens>",
    "swap_space": "what has no room in the KV cache is run again later",
    "temperature": OF_REQUESTS,
    "tokenizer": "it is the target's own",
}
"""What is said of options that are not there, or not with the same value."""


def hint_of_option(name: str, known: Iterable[str]) -> str:
    """What to write in place of an option that is not known."""
    if (advice := ADVICE.get(name.lower())) is not None:
        return advice
    near = nearest(name, known, elsewhere=NAMES)
    return f"did you mean {near!r}?" if near else "`tandem serve --help` lists all"
