"""Every option of the app: `tandem serve name=value`, or `args:` in a YAML file.

The model stands below the deployments, since `tandem plan` reads the same options. The public name
is `deployments.AppArgs`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cluster import bundled
from cluster.drafters import read_drafters
from cluster.foreign_options import hint_of_option
from cluster.gpu_shares import GPU_PARTS, check_gpu_share
from cluster.option_errors import option_sentence, refuse_unknown
from cluster.replica_range import ONE_REPLICA, ReplicaRange
from workers.errors import ConfigError
from workers.model_source import ModelSource
from workers.quantization import Quantization
from workers.types import HeterogeneousVocab, Rule

Gamma = Annotated[int, Field(ge=0, le=64)] | Literal["dynamic"]
Switch = Literal["on", "off"]
DEVICES = r"^(auto|cpu|cuda(:\d+)?)$"
OF_DRAFT_MODEL = ("draft_revision", "draft_quantization", "draft_gpu_share", "heterogeneous_vocab")


class AppArgs(BaseModel):
    """Options of `deployments:app`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    target: str = Field(default=bundled.TARGET_NAME, min_length=1)
    """The model that decides every token: a Hugging Face id or a folder. By default the bundled
    demo model."""
    draft: str | None = None
    """The model that guesses ahead. The bundled target comes with its own."""
    heterogeneous_vocab: HeterogeneousVocab = "auto"
    """What is done with a draft model that has other tokens than the target. `intersection`: it
    drafts only tokens that both have. `retokenize`: it drafts text, which the target's tokenizer
    cuts into tokens. `auto`: the tokens are taken as they are if the vocabularies agree, else the
    intersection if at least half of each is in the other, else texts are tokenized again."""
    revision: str | None = Field(default=None, min_length=1)
    """A branch, a tag or a commit of the target on Hugging Face; by default its main branch."""
    draft_revision: str | None = Field(default=None, min_length=1)
    """A branch, a tag or a commit of the draft model on Hugging Face; by default its main
    branch."""
    trust_remote_code: bool = False
    """Whether Python code that a model or its tokenizer brings may be run, where transformers has
    none of its own for it: whoever can write to its repository can then run code in every replica.
    Give a commit as `revision` of what you have read."""
    drafter: str = "model"
    """What guesses ahead: `model`, the draft model; `prompt_lookup`, what followed the same words
    earlier in prompt and output, without a model; `suffix`, the same in finished texts too;
    `early_exit`, the target's own first layers; or several, separated by commas: the first that has
    something to say speaks. `none` for plain decoding, but for what a client predicts itself."""
    early_exit_layer: int | None = Field(default=None, ge=1)
    """With `drafter=early_exit`, how many of the target's first layers draft. That pays with models
    that were trained for it, as those of LayerSkip are."""
    num_target_groups: ReplicaRange = ONE_REPLICA
    """Replicas of the target: a number, or min:max to autoscale."""
    num_draft_replicas: ReplicaRange = ONE_REPLICA
    """Replicas of the draft model: a number, or min:max to autoscale."""
    num_router_replicas: ReplicaRange = ONE_REPLICA
    """Replicas of the router, which share all targets and drafters: a number, or min:max to
    autoscale. The options that limit a router limit each."""
    num_speculative_tokens: int = Field(default=16, ge=0, le=64)
    """The most draft tokens a round may verify per sequence."""
    gamma: Gamma = "dynamic"
    """Draft tokens that a round verifies per sequence: a number, 0 to decode plainly, or `dynamic`
    to choose by what they cost and how many are accepted."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether the drafter drafts the next round while the target verifies, as if all drafts were
    accepted. `auto` finds out whether that pays, which on shared cores it may not."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share the target's weights, each with a GPU or its part of the cores: on one
    node if one has room, else across nodes. Their number has to divide the model's heads."""
    verification: Rule = "coupled"
    """The rule by which drafts are judged, unless a request names one. `coupled`: a draft is
    accepted if it is the target's own seeded sample, so a text is that of its seed. `rejection` and
    `block` compare the target's law with the drafter's, of each draft or of all together: more of
    what is drawn is accepted, and texts are exact in law only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and cache. `auto` is the checkpoint's own, but float32 for a float16
    one on a CPU, where only float32 and bfloat16 give texts that do not depend on drafts."""
    quantization: Quantization = "none"
    """How the target's linear layers are quantized as they are loaded: `int8` (torchao; weights of
    8 bits), `bnb_int8` (bitsandbytes; weights and inputs of 8 bits), `bnb_nf4` (bitsandbytes;
    weights of 4 bits), or not. The rest of the model stays in `dtype`. Not with
    `tensor_parallel_size`. A checkpoint that is quantized already needs no option."""
    draft_quantization: Quantization = "none"
    """How the draft model is quantized as it is loaded, in the words of `quantization`, which it
    does not follow."""
    device: str = Field(default="auto", pattern=DEVICES)
    """`cpu`, `cuda`, or `auto`: CUDA where the cluster has GPUs when the app is deployed."""
    draft_gpu_share: float = Field(default=1, gt=0, le=1, multiple_of=1 / GPU_PARTS)
    """Part of a GPU that each draft replica takes, and of its memory. At 1 it has a card of its
    own; below 1 each rank of a target takes the rest of a card (1 - share), so that both fit on
    one."""
    compile: Literal["auto", "wait", "off"] = "auto"
    """Whether the models' forwards are compiled on a CPU, once per machine. `auto`: in the
    background, while the models' own code serves; in bfloat16, a text written before the change,
    or across it, may differ from a later one of the same seed where two tokens are nearly as
    likely. `wait`: a replica serves once its forward is compiled, or cannot be, so a seed has one
    text. `off`: the models' own code alone, so a seed has one text too. On CUDA forwards are
    recorded as graphs before the first request, unless `off`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens; by default what the target allows."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Completions that run at a time in one router; more wait their turn."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Completions that may wait in one router; more are refused with status 429."""
    queue_timeout_s: float | None = Field(default=None, gt=0)
    """How long a completion may wait for its turn; then it is refused with status 503."""
    api_keys_file: str | None = Field(default=None, min_length=1)
    """A file of the API keys that are let in, with their limits, which is read again when it
    changes. Keys in TANDEM_API_KEYS are let in too; without either, anybody is."""
    request_log: Switch = "on"
    """Whether routers write a line of JSON for each completion and chat to their standard error:
    counts, times and the key's name, never a text."""
    max_request_bytes: int = Field(default=4 * 1024**2, ge=1024)
    """The longest request that is read, in bytes; a longer one is refused with status 413."""
    cors_allow_origins: str | None = None
    """Origins of web pages whose scripts may call the HTTP API, separated by commas, like
    `https://chat.example.org`; `*` for any. By default none may."""
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens a target step may take in, which bounds how long it holds up running
    streams. By default 256 on a CPU, 2048 on a GPU."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the KV cache."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """GiB of the target's KV cache, for each rank; by default 30 % of the free memory on a CPU and
    90 % on a GPU. More than `max_num_seqs` full sequences need is never taken."""
    prefix_caching: Switch = "on"
    """Whether prompts that begin alike, under the same `cache_salt`, share what is cached."""
    target_num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of a target step. By default all cores that its process may use, which the ranks
    of a group share, and one for weights below 8 MiB."""
    draft_num_threads: int = Field(default=1, ge=1)
    """CPU threads of a draft step. A small model gains nothing from more, and its idle threads
    would slow the target down."""
    draft_timeout_s: float = Field(default=1.0, gt=0)
    """How long a round waits for drafts before it goes on without; twice that after a prefetch."""
    verify_timeout_s: float = Field(default=120.0, gt=0)
    """How long a target may be silent before its sequences move to another, and how long a step may
    take before its replica ends. Of a long prompt a target tells every 20 seconds."""
    recovery_timeout_s: float = Field(default=60.0, gt=0)
    """How long a completion waits for some target: it fails with the first call that fails then."""
    drain_timeout_s: float = Field(default=120.0, ge=0)
    """How long a router that is to stop waits for its completions; those that take longer are cut.
    Targets and drafters need not wait: what runs there moves."""
    chat_template: str | None = None
    """A file with a chat template in Jinja, on the machine of each router, in place of the
    tokenizer's own."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = "auto"
    """How the model writes calls of tools in a chat, which are found in its text: `auto` takes the
    format that its chat template describes, if it is one of these; with `none`, calls stay in the
    text."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """Whether what the model thinks before it answers is split from a chat's answer: `auto` does if
    its chat template has tags of thoughts, `think` looks for `<think>` and `</think>` in any case,
    and with `none` thoughts stay in the text."""
    served_model_name: str | None = None
    """The model name that clients use, or several with commas, of which answers have the first; by
    default the target's. A request may leave the name out."""
    http_host: str = "127.0.0.1"
    """Where HTTP listens when `serve run` starts Serve; 0.0.0.0 for all interfaces."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """The HTTP port when `serve run` starts Serve, 0 for a free one; a running Serve keeps its
    own."""
    grpc_host: str = "127.0.0.1"
    """Where gRPC listens when `serve run` starts Serve; 0.0.0.0 for all interfaces."""
    grpc_port: int = Field(default=9000, ge=0, le=65535)
    """The gRPC port when `serve run` starts Serve, 0 for a free one; a running Serve keeps its
    own."""
    grpc_reflection: bool = True
    """Whether gRPC tells clients its services and messages, as tools like grpcurl ask."""
    tls_cert_file: str | None = None
    """A PEM file with the certificate of this server, and those between it and its authority. With
    it and `tls_key_file`, HTTP and gRPC are encrypted when `serve run` starts Serve; by default
    both are plain text. The files are read by the proxy of each node, once."""
    tls_key_file: str | None = None
    """A PEM file with the private key of `tls_cert_file`, without a password."""
    allow_unauthenticated_cluster: bool = False
    """Whether to start where Ray asks nobody for a token although it can be reached from other
    machines: whoever reaches its ports can run code there."""

    @model_validator(mode="before")
    @classmethod
    def _suggest_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            refuse_unknown(values, cls.model_fields, what="option", hint_of=hint_of_option)
        return values

    @field_validator("compile", "overlap", "prefix_caching", "request_log", mode="before")
    @classmethod
    def _read_yaml_words(cls, value: Any) -> Any:
        """YAML takes a bare `off` for false and `on` for true; and people write either."""
        return {"false": "off", "true": "on"}.get(str(value).lower(), value)

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _join_names(cls, value: Any) -> Any:
        """A list with commas, or YAML's own."""
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("drafter", mode="before")
    @classmethod
    def _check_drafters(cls, value: Any) -> Any:
        """A list with commas, or YAML's own; raises ValueError about what is wrong in it."""
        return read_drafters(value) if isinstance(value, str | list | tuple) else value

    @model_validator(mode="after")
    def _check_together(self) -> "AppArgs":
        self._check_drafting()
        self._check_models()
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            given, other = ("cert", "key") if self.tls_key_file is None else ("key", "cert")
            raise ValueError(
                f"tls_{given}_file is given without tls_{other}_file; encryption takes both, plain "
                "text neither"
            )
        if self.http_port == self.grpc_port != 0:
            raise ValueError(
                f"http_port and grpc_port are both {self.http_port}; give gRPC another port, like "
                f"grpc_port={self.http_port % 65535 + 1}"
            )
        return self

    def _check_drafting(self) -> None:
        if self.gamma != "dynamic" and self.gamma > self.num_speculative_tokens:
            raise ValueError(
                f"gamma={self.gamma} is more than num_speculative_tokens="
                f"{self.num_speculative_tokens}; raise the latter or lower gamma"
            )
        if "model" in self.drafters and self.draft_model is None:
            raise ValueError(
                f"target={self.target} needs a draft model: give draft=<a smaller model>, "
                "drafter=prompt_lookup to guess from the text itself, or drafter=none for plain "
                "decoding"
            )
        if "model" not in self.drafters and self.draft is not None:
            raise ValueError(
                f"draft={self.draft} is not used with drafter={self.drafter}; drop one of them"
            )
        has_early_exit = "early_exit" in self.drafters
        if has_early_exit and self.early_exit_layer is None:
            raise ValueError(
                f"drafter={self.drafter} needs to know how many of the target's first layers "
                "draft; give early_exit_layer=<their number>, which the card of a model trained "
                "for it names"
            )
        if self.early_exit_layer is not None and not has_early_exit:
            raise ValueError(
                f"early_exit_layer={self.early_exit_layer} is not used with "
                f"drafter={self.drafter}; drop it, or give drafter=early_exit"
            )

    def _check_models(self) -> None:
        if self.draft_model is None:
            for name in OF_DRAFT_MODEL:
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={value} is given, but drafter={self.drafter} has no draft model; "
                        "drop one of them"
                    )
        for name, model in (("revision", self.target), ("draft_revision", self.draft_model)):
            if (value := getattr(self, name)) is not None and bundled.is_bundled(model or ""):
                raise ValueError(
                    f"{name}={value} is given, but {model} is bundled, and has one state only; "
                    f"drop {name}, or give another model"
                )
        if self.quantization != "none" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"quantization={self.quantization} is not served with tensor_parallel_size="
                f"{self.tensor_parallel_size}; use tensor_parallel_size=1, or a checkpoint that is "
                "quantized already"
            )
        check_gpu_share(self.draft_gpu_share, device=self.device, tp_size=self.tensor_parallel_size)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names in `drafter`, in its order; nothing for plain decoding."""
        return () if self.drafter == "none" else tuple(self.drafter.split(","))

    @property
    def draft_model(self) -> str | None:
        """The draft model to load, if any."""
        if "model" not in self.drafters:
            return None
        if self.draft is None and self.target == bundled.TARGET_NAME:
            return bundled.DRAFT_NAME
        return self.draft

    @property
    def target_source(self) -> ModelSource:
        """The target, and what of it is to be loaded; a bundled one by its name."""
        return ModelSource(
            name=self.target, revision=self.revision, trust_remote_code=self.trust_remote_code
        )

    @property
    def draft_source(self) -> ModelSource | None:
        """The draft model, and what of it is to be loaded, if there is one."""
        if self.draft_model is None:
            return None
        return ModelSource(
            name=self.draft_model,
            revision=self.draft_revision,
            trust_remote_code=self.trust_remote_code,
        )

    @property
    def cors_origins(self) -> tuple[str, ...]:
        origins = (self.cors_allow_origins or "").split(",")
        return tuple(origin.strip() for origin in origins if origin.strip())

    @property
    def model_name(self) -> str:
        """The name that answers have."""
        return self._model_names[0]

    @property
    def model_aliases(self) -> tuple[str, ...]:
        """Other names that requests may have."""
        return self._model_names[1:]

    @property
    def _model_names(self) -> tuple[str, ...]:
        names = (name.strip() for name in (self.served_model_name or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name)) or (self.target,)


def parse_options(values: Mapping[str, Any]) -> AppArgs:
    """The options of these names and values; raises ConfigError, a sentence about what is wrong."""
    try:
        return AppArgs.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(option_sentence(error.errors())) from None
