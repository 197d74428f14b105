"""What is said of wrong options: one sentence with the name, the value and the fix."""

import re

import pytest

from cluster.foreign_options import ADVICE, NAMES
from deployments.args import AppArgs, parse_options
from workers.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tarqet": "x"}, "there is no option 'tarqet'; did you mean 'target'?"),
        ({"GAMMA": "3"}, "there is no option 'GAMMA'; did you mean 'gamma'?"),
        ({"model": "x"}, "there is no option 'model'; did you mean 'target'?"),
        (
            {"data_parallel_size": "2"},
            "there is no option 'data_parallel_size'; did you mean 'num_target_groups'?",
        ),
        (
            {"speculative_model": "x"},
            "there is no option 'speculative_model'; did you mean 'draft'?",
        ),
        (
            {"gpu_memory_utilization": "0.9"},
            "there is no option 'gpu_memory_utilization'; did you mean 'kv_cache_gib'?",
        ),
        ({"enforce_eager": "true"}, "there is no option 'enforce_eager'; write compile=off"),
        ({"seed": "1"}, "there is no option 'seed'; requests have it as a field"),
        ({"ABC": "1"}, "there is no option 'ABC'; `tandem serve --help` lists all"),
        (
            {"drafter": "ngram"},
            "drafter is 'ngram'; did you mean 'prompt_lookup'? It must be 'model', "
            "'prompt_lookup', 'suffix', 'early_exit', 'none' or a list like 'suffix,model'",
        ),
        ({"gamma": "99"}, "gamma is '99'; it must be at most 64"),
        ({"gamma": "-1"}, "gamma is '-1'; it must be at least 0"),
        ({"gamma": "fast"}, "gamma is 'fast'; it must be a whole number or 'dynamic'"),
        ({"num_router_replicas": "0"}, "num_router_replicas is 0; it must be at least 1"),
        (
            {"num_draft_replicas": "4:1"},
            "num_draft_replicas: 4:1 has its maximum below its minimum",
        ),
        (
            {"drafter": "magic"},
            "drafter is 'magic'; it must be 'model', 'prompt_lookup', 'suffix', 'early_exit', "
            "'none' or a list like 'suffix,model'",
        ),
        (
            {"drafter": "suffix,early_exit"},
            "drafter=suffix,early_exit needs to know how many of the target's first layers draft; "
            "give early_exit_layer=<their number>, which the card of a model trained for it names",
        ),
        (
            {"early_exit_layer": "4"},
            "early_exit_layer=4 is not used with drafter=model; drop it, or give "
            "drafter=early_exit",
        ),
        ({"early_exit_layer": "0"}, "early_exit_layer is '0'; it must be at least 1"),
        ({"kv_cache_gib": "nan"}, "kv_cache_gib is 'nan'; it must be a finite number"),
        ({"kv_cache_gib": "0"}, "kv_cache_gib is '0'; it must be above 0"),
        ({"recovery_timeout_s": "inf"}, "recovery_timeout_s is 'inf'; it must be a finite number"),
        ({"http_port": "70000"}, "http_port is '70000'; it must be at most 65535"),
        ({"max_model_len": "1.5"}, "max_model_len is '1.5'; it must be a whole number"),
        ({"device": "tpu"}, "device is 'tpu'; it must be 'auto', 'cpu' or 'cuda'"),
        ({"target": ""}, "target is ''; it must be a text that is not empty"),
        (
            {"allow_unauthenticated_cluster": "maybe"},
            "allow_unauthenticated_cluster is 'maybe'; it must be true or false",
        ),
        (
            {"http_port": "9000"},
            "http_port and grpc_port are both 9000; give gRPC another port, like grpc_port=9001",
        ),
        (
            {"target": "org/model"},
            "target=org/model needs a draft model: give draft=<a smaller model>, "
            "drafter=prompt_lookup to guess from the text itself, or drafter=none for plain "
            "decoding",
        ),
        (
            {"quantization": "int4"},
            "quantization is 'int4'; it must be 'none', 'int8', 'bnb_int8' or 'bnb_nf4'",
        ),
        (
            {"draft_quantization": "int8", "drafter": "none"},
            "draft_quantization=int8 is given, but drafter=none has no draft model; drop one of "
            "them",
        ),
        (
            {"draft_revision": "v2", "drafter": "prompt_lookup"},
            "draft_revision=v2 is given, but drafter=prompt_lookup has no draft model; drop one of "
            "them",
        ),
        (
            {"heterogeneous_vocab": "intersection", "drafter": "suffix"},
            "heterogeneous_vocab=intersection is given, but drafter=suffix has no draft model; "
            "drop one of them",
        ),
        (
            {"draft_gpu_share": "0.1", "drafter": "suffix"},
            "draft_gpu_share=0.1 is given, but drafter=suffix has no draft model; drop one of them",
        ),
        (
            {"draft_gpu_share": "0.1", "device": "cpu"},
            "draft_gpu_share=0.1 is given, but device=cpu uses no GPU; drop one of them",
        ),
        (
            {"draft_gpu_share": "0.5", "tensor_parallel_size": "2"},
            "draft_gpu_share=0.5 leaves so little to the ranks of tensor_parallel_size=2 that two "
            "of a group could be on one GPU, which NCCL refuses; use less than 0.5",
        ),
        ({"draft_gpu_share": "0"}, "draft_gpu_share is '0'; it must be above 0"),
        ({"draft_gpu_share": "1.1"}, "draft_gpu_share is '1.1'; it must be at most 1"),
        (
            {"draft_gpu_share": "0.00001"},
            "draft_gpu_share is '0.00001'; it must be a multiple of 0.0001",
        ),
        (
            {"revision": "v2"},
            "revision=v2 is given, but tandem-demo is bundled, and has one state only; drop "
            "revision, or give another model",
        ),
        ({"revision": ""}, "revision is ''; it must be a text that is not empty"),
    ],
    ids=str,
)
def test_a_wrong_option_is_explained_in_a_sentence(values: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(values)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", AppArgs.model_fields)
def test_a_long_value_is_not_repeated_in_full(name: str) -> None:
    messages = []
    for value in ("9" * 5000, "x" * 5000):
        try:
            parse_options({name: value})
        except ConfigError as error:
            messages.append(str(error))
    assert all(name in message and len(message) <= 600 for message in messages)


def test_both_ports_may_be_any_free_one() -> None:
    args = parse_options({"http_port": "0", "grpc_port": "0"})
    assert (args.http_port, args.grpc_port) == (0, 0)


def test_other_programs_names_lead_to_options_that_there_are() -> None:
    known = AppArgs.model_fields.keys()
    assert known >= set(NAMES.values())
    assert known.isdisjoint({*NAMES, *ADVICE})
    for advice in ADVICE.values():
        assert known >= set(re.findall(r"(\w+)=", advice.replace("TANDEM_API_KEYS=", "")))


@pytest.mark.parametrize(
    ("given", "taken"), [("true", "on"), ("False", "off"), (True, "on"), ("on", "on")]
)
def test_switches_are_written_as_one_likes(given: object, taken: str) -> None:
    args = AppArgs.model_validate({"prefix_caching": given, "request_log": given, "overlap": given})
    assert args.prefix_caching == args.request_log == args.overlap == taken
