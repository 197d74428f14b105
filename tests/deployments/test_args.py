"""Options as `serve run` gives them (strings) and as YAML does."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster import bundled
from cluster.drafters import DRAFTERS
from deployments.args import AppArgs
from deployments.router.drafting import early_exit, remote
from deployments.router.drafting.chain import LOCAL_DRAFTERS
from workers.model_source import ModelSource


def test_defaults_serve_the_bundled_pair() -> None:
    args = AppArgs()
    assert (args.target, args.draft_model) == (bundled.TARGET_NAME, bundled.DRAFT_NAME)
    assert args.model_name == "tandem-demo"


@pytest.mark.parametrize("names", ["a, b,a,,c", ["a", "b", "c"], ("a", "b", "c")])
def test_a_model_may_have_several_names(names: Any) -> None:
    args = AppArgs.model_validate({"served_model_name": names})
    assert (args.model_name, args.model_aliases) == ("a", ("b", "c"))
    for nothing in ("", " , ", None):
        assert AppArgs(served_model_name=nothing).model_name == "tandem-demo"
    assert AppArgs().model_aliases == ()


def test_strings_of_the_command_line_are_converted() -> None:
    args = AppArgs.model_validate(
        {
            "gamma": "2",
            "kv_cache_gib": "0.5",
            "drafter": "none",
            "num_draft_replicas": "1:4",
            "num_target_groups": "2",
            "tensor_parallel_size": "1",
            "max_model_len": "512",
        }
    )
    assert (args.gamma, args.kv_cache_gib, args.max_model_len) == (2, 0.5, 512)
    assert (args.drafters, args.draft_model) == ((), None)
    assert str(args.num_draft_replicas) == "1:4"


@pytest.mark.parametrize(
    ("value", "drafters", "has_model"),
    [
        ("model", ("model",), True),
        ("prompt_lookup", ("prompt_lookup",), False),
        ("prompt_lookup, model", ("prompt_lookup", "model"), True),
        (["model", "prompt_lookup"], ("model", "prompt_lookup"), True),
        ("none", (), False),
        (["none"], (), False),
    ],
)
def test_drafters_are_a_list_with_commas_or_one_of_yaml(
    value: object, drafters: tuple[str, ...], has_model: bool
) -> None:
    args = AppArgs.model_validate({"drafter": value})
    assert args.drafters == drafters
    assert args.draft_model == (bundled.DRAFT_NAME if has_model else None)
    assert AppArgs.model_validate(args.model_dump(mode="json")) == args


def test_every_drafter_that_can_be_named_is_there() -> None:
    assert {*DRAFTERS} == {*LOCAL_DRAFTERS, remote.SOURCE, early_exit.SOURCE}


def test_words_that_yaml_takes_for_truth_values_are_what_was_written() -> None:
    values = yaml.safe_load("{compile: off, overlap: on, prefix_caching: off}")
    assert values == {"compile": False, "overlap": True, "prefix_caching": False}
    args = AppArgs.model_validate(values)
    assert (args.compile, args.overlap, args.prefix_caching) == ("off", "on", "off")
    assert AppArgs(compile="wait").compile == "wait"


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (3, {"num_replicas": 3}),
        ("3", {"num_replicas": 3}),
        ("2:2", {"num_replicas": 2}),
        (
            "1:4",
            {
                "num_replicas": None,
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
            },
        ),
    ],
)
def test_replica_ranges_become_serve_options(value: object, options: dict[str, Any]) -> None:
    args = AppArgs.model_validate({"num_draft_replicas": value})
    assert args.num_draft_replicas.serve_options() == options


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tarqet": "x"}, ["no option 'tarqet'", "did you mean 'target'"]),
        ({"zzz": "x"}, ["no option 'zzz'", "tandem serve --help"]),
        ({"gamma": "17"}, ["gamma=17", "num_speculative_tokens=16", "raise the latter"]),
        ({"gamma": "-1"}, ["gamma", "greater than or equal to 0"]),
        ({"gamma": "four"}, ["gamma", "integer", "'four'"]),
        ({"drafter": "magic"}, ["drafter is 'magic'; it must be 'model', 'prompt_lookup'"]),
        (
            {"drafter": "model,prompt_lokup"},
            ["no drafter 'prompt_lokup'", "did you mean 'prompt_lookup'?", "'none' or a list"],
        ),
        ({"drafter": "model,"}, ["drafter is 'model,'", "no drafter ''"]),
        ({"drafter": ""}, ["drafter is ''", "it must be 'model'"]),
        ({"drafter": []}, ["drafter is ''", "it must be 'model'"]),
        ({"drafter": "model,model"}, ["drafter is 'model,model'", "twice", "name each once"]),
        ({"drafter": "none,model"}, ["'none' means no drafter", "drop it, or the others"]),
        ({"drafter": "model,none"}, ["'none' means no drafter"]),
        ({"target": "org/model"}, ["target=org/model needs a draft model", "drafter=none"]),
        ({"target": "org/model", "drafter": "prompt_lookup,model"}, ["needs a draft model"]),
        ({"draft": "x", "drafter": "prompt_lookup"}, ["not used with drafter=prompt_lookup"]),
        ({"draft": "x", "drafter": "none"}, ["draft=x is not used"]),
        ({"num_draft_replicas": "4:1"}, ["4:1", "maximum below its minimum"]),
        ({"num_draft_replicas": "few"}, ["'few'", "like 2 or 1:4"]),
        ({"num_target_groups": "0"}, ["num_target_groups", "greater than or equal to 1"]),
        ({"tensor_parallel_size": "0"}, ["tensor_parallel_size", "greater than or equal to 1"]),
        ({"verification": "lossy"}, ["verification", "'coupled', 'rejection' or 'block'"]),
        ({"dtype": "int8"}, ["dtype", "'bfloat16'", "'int8'"]),
        ({"http_port": "99999"}, ["http_port", "less than or equal to 65535"]),
        ({"kv_cache_gib": "0"}, ["kv_cache_gib", "greater than 0"]),
    ],
    ids=str,
)
def test_wrong_options_say_what_and_how_to_mend_it(
    values: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate(values)
    for word in words:
        assert word in str(caught.value)


def test_target_and_draft_have_sources_of_their_own() -> None:
    args = AppArgs.model_validate(
        {"target": "org/big", "draft": "org/small", "revision": "v2", "quantization": "int8"}
    )
    assert args.target_source == ModelSource(name="org/big", revision="v2")
    assert args.draft_source == ModelSource(name="org/small")
    assert (args.quantization, args.draft_quantization) == ("int8", "none")
    trusted = AppArgs.model_validate(
        {"target": "a", "draft": "b", "draft_revision": "v3", "trust_remote_code": "true"}
    )
    assert trusted.target_source == ModelSource(name="a", trust_remote_code=True)
    assert trusted.draft_source == ModelSource(name="b", revision="v3", trust_remote_code=True)
    assert AppArgs(drafter="none").draft_source is None


def test_every_option_is_described() -> None:
    for name, field in AppArgs.model_fields.items():
        assert field.description, f"{name} has no docstring"


def test_origins_are_a_list_with_commas() -> None:
    assert AppArgs().cors_origins == ()
    args = AppArgs(cors_allow_origins="https://a.example, https://b.example,")
    assert args.cors_origins == ("https://a.example", "https://b.example")
