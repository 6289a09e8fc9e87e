"""Frozen, strict configuration. It rejects unknown keys, and never adjusts a value silently. This
module imports no jax.

A user writes an `EngineConfig`, in which None means "choose for me". `resolve()` turns it, once,
into a `Resolved`, in which nothing is left to choose. A run saves the `Resolved`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pagedjax.options import exclusions
from pagedjax.options.own_names import (
    NamedValue,
    is_value,
    name_in_one_line,
    names_own_value,
)

DType = Literal["float32", "bfloat16", "float16"]
# Formats of matrices beside the dtypes: where each `Format` is (pagedjax/device/formats)
STORED_FORMATS = {"int8": "pagedjax.device.formats.int8:FORMAT"}
AS_STORED = "stored"  # the `weight_dtype` of matrices that stay as they are in a file
if TYPE_CHECKING:
    WeightDType = str  # a type checker takes no Literal that is computed
else:  # and the command line reads its choices from one
    WeightDType = Literal[(*get_args(DType), *STORED_FORMATS, AS_STORED)]
CacheDType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]
PolicyName = Literal[
    "fcfs",
    "priority",
    "shortest",
    "fair",
    "longest_prefix",
    "static",
    "vtc",
    "mlfq",
    "srtf",
    "deadline",
    "early_rejection",
]
KVPolicyName = Literal["full", "streaming", "quest"]
Reservation = Literal["none", "oracle", "pow2", "max"]
Preemption = Literal["recompute", "swap"]
Compilation = Literal["eager", "lazy", "background"]
DraftMethod = Literal["ngram", "suffix", "draft", "eagle"]
AcceptanceRule = Literal["strict", "rejection"]
AttentionImpl = Literal[
    "xla",
    "cpu",
    "pallas_tpu",
    "pallas_gpu",
    "pallas_gpu_overlapped",
    "pallas_gpu_fused",
    "reference",
]
LinearImpl = Literal["reference", "xla", "cpu", "cpu_int8", "pallas_gpu", "pallas_tpu"]
StateImpl = Literal["xla", "pallas_tpu"]

Config = TypeVar("Config")

MAX_DRAFT_TOKENS = 32  # the most draft tokens of a sequence in a step
MAX_TAP_BYTES = 2**30  # the most bytes of a request's taps, unless `max_tap_bytes` is set
ON_DEVICE = ("draft", "eagle")  # methods whose drafter is a model
VLLM_NAMES = {  # name in vLLM's speculative_config -> field of `Speculative`
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
}
VLLM_METHODS = {"draft_model": "draft"}


class Integers(NamedTuple):
    """The integers that a field may hold. `remedy` is added to the error."""

    smallest: int
    largest: int | None = None
    remedy: str = ""

    def check(self, name: str, value: object) -> None:
        limit = float("inf") if self.largest is None else self.largest
        if not (_is_integer(value) and self.smallest <= value <= limit):
            limits = (
                f"of at least {self.smallest}"
                if self.largest is None
                else f"from {self.smallest} to {self.largest}"
            )
            raise ValueError(f"{name} is {value!r}; it must be an integer {limits}{self.remedy}")


class StoredDTypes:
    """The dtypes and formats of stored matrices."""

    def check(self, name: str, value: object) -> None:
        one_of(name, value, (*get_args(DType), *STORED_FORMATS, AS_STORED))


Size = Annotated[int, Integers(1)]
_DRAFT_TOKENS = Integers(1, MAX_DRAFT_TOKENS, "; to switch speculation off, leave speculative out")


@dataclass(frozen=True)
class Speculative:
    """Speculative decoding: which drafter guesses the next tokens of a sequence, and how many.

    method: "ngram": the tokens that followed the last tokens where these occurred before in the
        sequence (prompt lookup); "suffix": the same by a tree of suffixes, also over earlier
        outputs of the engine; "draft": a smaller model; "eagle": a head on the model's own layers.
        A user's own drafter is "module:NAME" or "folder/file.py:NAME", a mapping of it and its
        parameters, or a `Drafter`; see engine/drafters.
    model: of "draft", a path, hub id or name for `load_model`, with the model's own tokenizer; of
        "eagle", the folder of a head (`python -m experiments.training.train_draft`).
    weight_dtype: of "draft", the matrices of its model, as in `EngineConfig`. None is "stored" if
        the model's is "stored" and the draft model's checkpoint has such matrices; else its dtype.
    num_tokens: the most draft tokens of a sequence in a step. One step verifies all of them and
        adds one token.
    adaptive: draft fewer tokens, or none, where more would not pay. This follows from the share of
        accepted drafts and the measured times of steps. Tokens do not depend on it.
    rule: which drafts are accepted. "strict": those that equal the token that the engine samples in
        their place, so tokens are those of an engine without drafts. "rejection": speculative
        sampling (Leviathan et al. 2023), which accepts more drafts; tokens have the same
        distribution, but are not the same tokens. Greedy requests are strict.
    ngram_max, ngram_min: of "ngram", the longest and the shortest run of tokens to look up.
    """

    method: str | Mapping[str, Any] | NamedValue = "ngram"  # __post_init__ replaces a mapping
    num_tokens: Annotated[int, _DRAFT_TOKENS] = 4
    adaptive: bool = True
    model: str | None = None
    weight_dtype: Annotated[WeightDType, StoredDTypes()] | None = None
    rule: AcceptanceRule = "strict"
    ngram_max: Annotated[int, Integers(1, MAX_DRAFT_TOKENS)] = 3
    ngram_min: Annotated[int, Integers(1, MAX_DRAFT_TOKENS)] = 1

    def __post_init__(self) -> None:
        check_fields(self, Speculative, "speculative.")
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"speculative.ngram_min is {self.ngram_min}; "
                f"it must be at most ngram_max {self.ngram_max}"
            )
        _read_own(self, "method", get_args(DraftMethod), field="speculative.method")
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(
                f"speculative.model is {self.model!r}; it must be a path, a hub id or a name"
            )
        exclusions.refuse(self, exclusions.SPECULATIVE)

    @property
    def on_device(self) -> bool:
        """Whether the drafter is a model."""
        return self.method in ON_DEVICE


# field -> (the policy that has it, its default, the smallest integer; None: it is a bool)
_KV_POLICY_SIZES: dict[str, tuple[str, Any, int | None]] = {
    "sinks": ("streaming", 4, 0),
    "window": ("streaming", 1020, 1),
    "tokens": ("quest", 1024, 1),
    "dense_layers": ("quest", 2, 0),
    "dense_prompts": ("quest", True, None),
}


@dataclass(frozen=True)
class KVPolicyOptions:
    """Which blocks of its sequence a query sees (docs/design/kv-policies.md).

    name: "full": all. "streaming": the first tokens and the last ones (StreamingLLM, arXiv
        2309.17453); other blocks are freed. "quest": a query reads the blocks whose keys fit it
        best (arXiv 2406.10774); all blocks are kept. A user's own `KVPolicy` is "module:NAME" or
        "folder/file.py:NAME", with the parameters of `NAME` in parentheses, or the value itself.
    sinks: of "streaming", the number of first tokens that every query sees; None is 4.
    window: of "streaming", the smallest number of last tokens that a query sees, its own included;
        None is 1020.
    tokens: of "quest", the largest number of tokens that a query reads, its own block included;
        None is 1024.
    dense_layers: of "quest", the number of first layers, where a query reads all; None is 2.
    dense_prompts: of "quest", whether queries of prompts read all; None is True.
    """

    name: str | NamedValue = "full"
    sinks: int | None = None
    window: int | None = None
    tokens: int | None = None
    dense_layers: int | None = None
    dense_prompts: bool | None = None

    def __post_init__(self) -> None:
        _read_own(self, "name", get_args(KVPolicyName), field="kv_policy")
        for name, (policy, default, minimum) in _KV_POLICY_SIZES.items():
            value = getattr(self, name)
            if value is None:
                if self.name == policy:
                    object.__setattr__(self, name, default)
            elif self.name != policy:
                raise ValueError(
                    f"kv_policy.{name} is {value!r}, and kv_policy.name {self.name!r}, "
                    f"which does not take it; leave it out, or use {policy!r}"
                )
            elif minimum is None:
                if not isinstance(value, bool):
                    raise ValueError(f"kv_policy.{name} is {value!r}; it must be True or False")
            elif type(value) is not int or value < minimum:
                raise ValueError(
                    f"kv_policy.{name} is {value!r}; it must be an integer of at least {minimum}"
                )

    @staticmethod
    def read(value: Any) -> KVPolicyOptions | None:
        """Returns the options that a value describes; None for "full".

        Args:
            value: None ("full"), a name, a mapping of fields (from YAML and the command line; of a
                user's own policy, its name and its parameters), a `KVPolicy`, or a
                `KVPolicyOptions`.

        Raises:
            ValueError: an unknown name or field, or a size out of range.
        """
        if isinstance(value, Mapping) and names_own_value(value.get("name")):
            value = KVPolicyOptions(name_in_one_line("kv_policy", value))
        elif isinstance(value, Mapping):
            fields = {str(name): item for name, item in value.items()}
            value = from_dict(KVPolicyOptions, fields, where="kv_policy.")
        elif isinstance(value, str) or is_value(value):
            value = KVPolicyOptions(value)
        elif value is not None and not isinstance(value, KVPolicyOptions):
            raise ValueError(
                f"kv_policy is {value!r}; it must be a name, "
                "or a mapping such as {'name': 'streaming'}"
            )
        return None if value is None or value.name == "full" else value


@dataclass(frozen=True)
class PrefixCheckpoints:
    """At which boundaries between blocks a prefix can be found, in layers that do not see a whole
    sequence (docs/design/prefix-caching.md#prefix-checkpoints).

    interval: tokens between two such boundaries of a sequence, a multiple of block_size; 0: none.
    prompts: the last boundary of a prompt that leaves a token of it to compute.
    texts: the last boundary of what was computed, when a sequence ends or is preempted.
    junctions: where the beginning ends that a sequence shares with earlier ones.
    """

    interval: Annotated[int, Integers(0)] = 0
    prompts: bool = False
    texts: bool = False
    junctions: bool = False

    def __post_init__(self) -> None:
        check_fields(self, PrefixCheckpoints, "prefix_checkpoints.")
        if not (self.interval or self.prompts or self.texts or self.junctions):
            raise ValueError(
                "prefix_checkpoints keeps nothing, so that no prefix would be found; give an "
                "interval, or one of prompts, texts and junctions, or set "
                "enable_prefix_caching=False"
            )

    def check_block_size(self, block_size: int) -> None:
        """Raises ValueError if the interval is not a number of whole blocks."""
        if self.interval % block_size:
            above = (self.interval // block_size + 1) * block_size
            raise ValueError(
                f"prefix_checkpoints.interval is {self.interval} tokens, and block_size is "
                f"{block_size}; it must be a multiple, such as {above}"
            )

    @staticmethod
    def read(value: Any) -> PrefixCheckpoints | None:
        """Returns the policy that a value describes; None for "every".

        Args:
            value: None or "every": every boundary; "last": prompts and texts; a
                `PrefixCheckpoints`, or a mapping of its fields (from YAML and the command line).

        Raises:
            ValueError: another name, an unknown field, or a policy that keeps nothing.
        """
        if value is None or isinstance(value, PrefixCheckpoints):
            return value
        if isinstance(value, Mapping):
            fields = {str(name): item for name, item in value.items()}
            return from_dict(PrefixCheckpoints, fields, where="prefix_checkpoints.")
        if not isinstance(value, str):
            raise ValueError(
                f"prefix_checkpoints is {value!r}; it must be 'every', 'last', or a mapping such "
                "as {'interval': 256, 'prompts': True}"
            )
        one_of("prefix_checkpoints", value, ("every", "last"))
        return PrefixCheckpoints(prompts=True, texts=True) if value == "last" else None


@dataclass(frozen=True)
class MeshConfig:
    """How many devices share one model, by axis of the mesh (docs/design/devices.md).

    tensor: heads, the width of every MLP and the vocabulary are split over this axis.
    expert: the experts of a mixture are dealt over this axis; everything else is split over both
        axes, as if they were one.
    """

    tensor: Size = 1
    expert: Size = 1

    def __post_init__(self) -> None:
        check_fields(self, MeshConfig, "mesh.")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.tensor * self.expert

    @staticmethod
    def read(value: Any) -> MeshConfig | None:
        """Returns the mesh that a value describes; None for None.

        Args:
            value: None, a `MeshConfig`, or sizes by axis (from YAML and the command line).

        Raises:
            ValueError: an axis that does not exist, or a size below 1.
        """
        if value is None or isinstance(value, MeshConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"mesh is {value!r}; it must be None, or sizes by axis, such as {{'tensor': 4}}"
            )
        if "data" in value:
            raise ValueError(
                "mesh has the axis 'data', and an engine has one cache and one queue; start an "
                "engine for each slice of the devices (devices=...), with a mesh of its own"
            )
        sizes = {str(name): size for name, size in value.items()}
        return from_dict(MeshConfig, sizes, where="mesh.")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and choices of one engine.

    block_size: token slots in a cache block (S).
    max_num_batched_tokens: the token budget of a step; decodes take theirs first, prompt chunks
        share the rest.
    max_num_seqs: sequences in a step at most (B). Never more run than the budget has tokens,
        because each needs one in each step.
    max_model_len: prompt + output tokens of one request at most; None is the model's own limit.
    num_blocks: cache blocks that requests can own; None is as many as fit into `memory_fraction` of
        the free memory (on a CPU at most 4 GiB) beside what a step needs, and no more than
        max_num_seqs requests of max_model_len can use.
    memory_fraction: share of the device's free memory for a step and the cache when num_blocks is
        None.
    swap_space_gib: host memory for the blocks of sequences that gave theirs up, in GiB; 0 is none.
    dtype: of weights and activations; None is float32 on a CPU and bfloat16 elsewhere.
    weight_dtype: of matrices; None is dtype. "int8" is 8 bits and a scale for each output. "stored"
        leaves the matrices of a quantized checkpoint in its 4 to 8 bits, with a scale for some
        inputs.
    kv_cache_dtype: of the keys and values that the cache keeps; None is dtype. "float8_e4m3fn"
        holds four times as many tokens as float32 and twice as many as bfloat16, to 3 bits of
        mantissa and without scales: nothing above 448.
    policy: the order of admission and the choice of victims when blocks run out; host/policies/
        states the promise of each. A user's own policy is "module:NAME" or "folder/file.py:NAME",
        a mapping of it and its parameters, such as {"name": "mine.py:aged", "worth": 64}, or a
        `Policy` (docs/design/policies.md).
    attention_impl: an implementation of pallas_kernels.paged_attention; None chooses by platform,
        once. A user's own one is named in the same way, or is an `Implementation`.
    linear_impl: an implementation of pallas_kernels.linear, in whose layout matrices are stored;
        None chooses by platform, once. A user's own one is named in the same way.
    state_impl: what computes the recurrent states of layers without attention
        (docs/design/state-layers.md); None is "xla" everywhere.
    model_family: what reads the model, if no built-in family does: "module:NAME" or
        "folder/file.py:NAME" of a `pagedjax.models.Family` (docs/design/models.md). It may replace
        a built-in family. None: a built-in family.
    token_buckets: the padded step sizes (T), a compiled program each; None is powers of two up to
        the budget, and on a GPU, for steps of decodes alone, every 32 from 32 to max_num_seqs.
    batch_invariant: the tokens and log-probabilities of a request have the same bits beside any
        other requests, and with any bucket, chunk, block size, cached prefix, preemption and number
        of threads. It needs implementations that promise it (docs/design/batch-invariance.md), and
        excludes the rule "rejection" of speculation.
    compilation: "eager": every bucket is compiled at start-up, several at a time; "lazy": each when
        a step first needs it, so that the first token comes sooner; steps without sampling options
        and log-probabilities have smaller programs then, unless `batch_invariant` is set. With
        "lazy", no step is measured when the number of blocks is chosen. "background": the largest
        is compiled at start-up, and the others one at a time while steps run; a step is padded to
        the next larger one that exists. It is the default of `LLM` and `pagedjax serve`, excludes
        speculative, and is for one process.
    preemption: what happens to the content of a preempted sequence. "recompute": its keys and
        values are computed again. "swap": they move to host memory, at most `swap_space_gib` of it,
        and come back; those that find no room there are computed again.
    lookahead: steps that are sent to the device before the tokens of the current step are known
        (engine/lookahead.py). With 0, each step waits for the one before. 1 hides the host's work
        behind the device's. It changes no token.
    decode_span: decode steps that one program computes, where the host knows that the next steps
        are decodes of the same rows (device/span.py). With 1, each step is a program. It is for
        steps that are not long beside the host's work: of small models in 4 or 8 bits on a CPU
        (measured), and of GPUs (not measured). A new request waits until the span is over, and its tokens come together. It
        changes no token and no plan, and excludes speculative, kv_policy and batch_invariant.
    late_stops: whether a step is planned before the tokens of the step before are known
        (host/late.py), as in vLLM's async scheduling: then the device does not wait for the
        scheduler, even if requests wait. A sequence that stops computes one more token, which is
        dropped. Plans are other ones; tokens are the same. It excludes speculative, and is for one
        process.
    empty_blocks: blocks that the prefix cache leaves empty after each step. A prediction may take
        no block with cached content, so without them lookahead and spans end where the cache is
        full. Each row may need ceil(decode_span * (lookahead + 1) / block_size) blocks for
        predicted steps: with 64 rows, spans of 8, lookahead 1 and blocks of 16, 64 blocks. It
        changes nothing without prefix caching.
    speculative: speculative decoding, a `Speculative` or a mapping of its fields, also under the
        names of vLLM's speculative_config; None is off. Unless its rule is "rejection", it changes
        no token. It excludes lookahead, because a draft follows known tokens, and lookahead sends a
        step before they are known.
    mesh: the devices that share the model, a `MeshConfig` or a mapping such as {"tensor": 4}; None
        is one device. It changes no token, up to rounding.
    devices: positions in `jax.devices()` of the devices to use, one each; None is the first ones.
    enable_prefix_caching: keep full blocks after their requests ended and share them with requests
        that begin alike.
    chunked_prefill, mixed_steps: whether a budget may cut prompts, and whether prompts and decodes
        share steps. Without them, steps are those of earlier engines (host/step_kinds.py), for
        comparisons.
    kv_policy: which blocks of its sequence a query still sees: "full" (None), "streaming", "quest",
        your own, or a `KVPolicyOptions` as a mapping, such as {"name": "streaming", "sinks": 4,
        "window": 1020}. Blocks that no query will see again are freed. All but "full" change
        tokens.
    free_window_blocks: give blocks back that lie before the windows of layers that have one. It
        changes no token.
    prefix_checkpoints: where prefixes can be found in layers that keep a state or have a window, so
        that their blocks push less out of the cache: "every" boundary between blocks (None), the
        "last" ones of prompts and texts, or a `PrefixCheckpoints` as a mapping, such as
        {"interval": 256, "prompts": True}. It changes no token, and nothing in models whose layers
        all see everything.
    reservation: "none" is paging. With another value, a sequence gets one contiguous piece of the
        cache for its whole life when it enters, as in engines before paging (host/reservation.py).
        This needs enable_prefix_caching=False.
    enable_lora: requests may have adapters of low rank (docs/design/adapters.md). It needs one
        device, and products that can add those of low rank. It excludes draft models.
    max_loras: the most adapters that an engine has at once.
    max_lora_rank: the rank of an adapter, at most; those of lower ranks are padded with zeros.
    row_features: sampling options of one's own (docs/design/logits-processors.md), each
        "module:NAME" or "folder/file.py:NAME" of a `RowFeature`.
    max_tap_bytes: bytes of what the taps of one request may give (docs/design/taps.md); None is 1
        GiB.
    seed: root of every random key; a request's own seed is folded into it.
    """

    block_size: Size = 16
    max_num_batched_tokens: Size = 2048
    max_num_seqs: Size = 64
    max_model_len: Size | None = None
    num_blocks: Size | None = None
    memory_fraction: float = 0.5
    swap_space_gib: float = 4.0
    dtype: DType | None = None
    weight_dtype: Annotated[WeightDType, StoredDTypes()] | None = None
    kv_cache_dtype: CacheDType | None = None
    # a PolicyName, an AttentionImpl, a LinearImpl, or a user's own. __post_init__ replaces a
    # mapping by a name in one line.
    policy: str | Mapping[str, Any] | NamedValue = "fcfs"
    attention_impl: str | Mapping[str, Any] | NamedValue | None = None
    linear_impl: str | Mapping[str, Any] | None = None
    state_impl: StateImpl | None = None
    model_family: str | Mapping[str, Any] | None = None
    token_buckets: tuple[int, ...] | None = None
    preemption: Preemption = "recompute"
    enable_prefix_caching: bool = True
    lookahead: Annotated[int, Integers(0)] = 0
    decode_span: Size = 1
    late_stops: bool = False
    empty_blocks: Annotated[int, Integers(0)] = 0
    speculative: Speculative | None = None
    mesh: MeshConfig | None = None
    devices: tuple[int, ...] | None = None
    compilation: Compilation = "eager"
    chunked_prefill: bool = True
    mixed_steps: bool = True
    # __post_init__ makes options of a name
    kv_policy: KVPolicyOptions | str | NamedValue | None = None
    free_window_blocks: bool = True
    # __post_init__ makes a `PrefixCheckpoints` of a name or a mapping
    prefix_checkpoints: PrefixCheckpoints | str | None = None
    reservation: Reservation = "none"
    batch_invariant: bool = False
    enable_lora: bool = False
    max_loras: Size = 1
    max_lora_rank: Size = 16
    row_features: tuple[str, ...] = ()
    max_tap_bytes: Size | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, EngineConfig)
        self._read_speculative()
        object.__setattr__(self, "kv_policy", KVPolicyOptions.read(self.kv_policy))
        checkpoints = PrefixCheckpoints.read(self.prefix_checkpoints)
        if checkpoints is not None:
            checkpoints.check_block_size(self.block_size)
        object.__setattr__(self, "prefix_checkpoints", checkpoints)
        object.__setattr__(self, "mesh", MeshConfig.read(self.mesh))
        object.__setattr__(self, "devices", checked_devices(self.devices, self.mesh))
        share = self.memory_fraction
        if not (_is_number(share) and 0.0 < share <= 1.0):
            raise ValueError(f"memory_fraction is {share!r}; it must be above 0 and at most 1")
        swap = self.swap_space_gib
        if not (_is_number(swap) and 0.0 <= swap < float("inf")):
            raise ValueError(f"swap_space_gib is {swap!r}; it must be a number of GiB, at least 0")
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**32):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer in [0, 2**32)")
        self._check_names()
        if self.token_buckets is not None:
            self._check_token_buckets()
        exclusions.refuse(self, exclusions.ENGINE)

    def _read_speculative(self) -> None:
        """Replace a mapping of fields by its `Speculative`. Raises ValueError for a wrong field."""
        if isinstance(self.speculative, Mapping):  # from YAML and the command line
            values: dict[str, Any] = dict(self.speculative)
            fields = {VLLM_NAMES.get(str(name), str(name)): item for name, item in values.items()}
            if len(fields) < len(values):
                raise ValueError(
                    f"speculative is {values!r}, which gives one field under two names"
                )
            method = fields.get("method")
            if isinstance(method, str):
                fields["method"] = VLLM_METHODS.get(method, method)
            options = from_dict(Speculative, fields, where="speculative.")
            object.__setattr__(self, "speculative", options)
        if not (self.speculative is None or isinstance(self.speculative, Speculative)):
            raise ValueError(
                f"speculative is {self.speculative!r}; it must be None, or its fields by name"
            )

    def _check_names(self) -> None:
        """Raises ValueError for an unknown policy, implementation, family or row feature."""
        _read_own(self, "policy", get_args(PolicyName))
        if self.attention_impl is not None:
            _read_own(self, "attention_impl", get_args(AttentionImpl))
        if self.linear_impl is not None:
            _read_own(self, "linear_impl", get_args(LinearImpl), by_value=False)
        if self.model_family is not None:
            family = name_in_one_line("model_family", self.model_family)
            object.__setattr__(self, "model_family", family)
        if self.model_family is not None and not names_own_value(self.model_family):
            raise ValueError(
                f"model_family is {self.model_family!r}; "
                "it must be module:NAME or folder/file.py:NAME of a Family, or None"
            )
        features = self.row_features
        if isinstance(features, (list, tuple)):  # YAML has no tuples
            features = tuple([name_in_one_line("row_features", name) for name in features])
            object.__setattr__(self, "row_features", features)
        if not isinstance(features, tuple) or not all(map(names_own_value, features)):
            raise ValueError(
                f"row_features is {features!r:.200}; "
                "it must be a list, and each item module:NAME or folder/file.py:NAME"
            )

    def _check_token_buckets(self) -> None:
        sizes: Any = self.token_buckets
        if isinstance(sizes, list):  # YAML has no tuples
            object.__setattr__(self, "token_buckets", tuple(sizes))
        if (
            not isinstance(sizes, (list, tuple))
            or not sizes
            or any(type(size) is not int or size < 1 for size in sizes)
            or list(sizes) != sorted(set(sizes))
        ):
            raise ValueError(
                f"token_buckets is {sizes!r}; it must be ascending integers of at least 1"
            )
        if sizes[-1] < self.max_num_batched_tokens:
            raise ValueError(
                f"the largest of token_buckets is {sizes[-1]}, below max_num_batched_tokens "
                f"{self.max_num_batched_tokens}; add it, or a step could be too large for every "
                "bucket"
            )

    @property
    def is_baseline(self) -> bool:
        """Whether steps or reservations are those of engines before paging or before mixed steps
        (host/step_kinds.py, host/reservation.py).
        """
        return self.reservation != "none" or not (self.chunked_prefill and self.mixed_steps)


NONE_STAYS = (
    "speculative",
    "mesh",
    "devices",
    "kv_policy",
    "prefix_checkpoints",
    "model_family",
)


@dataclass(frozen=True)
class Resolved(EngineConfig):
    """An EngineConfig in which nothing is left to choose. An engine runs with it and saves it.

    None stays only in fields where it means "without" or "the first ones" (NONE_STAYS).
    """

    # dataclasses need these defaults; `resolve` sets every one of the fields
    max_model_len: int = 0
    num_blocks: int = 0
    dtype: DType = "float32"
    weight_dtype: WeightDType = "float32"
    kv_cache_dtype: CacheDType = "float32"
    attention_impl: str = "xla"
    linear_impl: str = "xla"
    state_impl: StateImpl = "xla"
    token_buckets: tuple[int, ...] = ()
    max_tap_bytes: int = MAX_TAP_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and field.name not in NONE_STAYS:
                raise ValueError(f"{field.name} is not resolved")


def checked_devices(devices: Any, mesh: MeshConfig | None) -> tuple[int, ...] | None:
    """Returns the positions of devices as a tuple; None stays None.

    Raises:
        ValueError: they are not different positions, or not as many as the mesh has devices.
    """
    if devices is None:
        return None
    positions = tuple(devices) if isinstance(devices, list) else devices
    if (
        not isinstance(positions, tuple)
        or any(type(i) is not int or i < 0 for i in positions)
        or len(set(positions)) < len(positions)
    ):
        raise ValueError(
            f"devices is {positions!r}; it must be different positions in jax.devices(), from 0 on"
        )
    size = mesh.size if mesh else 1
    if len(positions) != size:
        raise ValueError(
            f"devices has {len(positions)} positions, and the mesh {size} devices; make them equal"
        )
    return positions


def _read_own(
    options: Any,
    name: str,
    built_in: tuple[str, ...],
    *,
    field: str | None = None,
    by_value: bool = True,
) -> None:
    """Replace a mapping of a user's own value by its name in one line.

    Args:
        name: the name of the field of `options`.
        field: the name of the field in errors; None: `name`.
        by_value: whether the value itself may be there.

    Raises:
        ValueError: the field has neither a built-in name nor a user's own value.
    """
    field = field or name
    value = name_in_one_line(field, getattr(options, name))
    object.__setattr__(options, name, value)
    if not (names_own_value(value) or (by_value and is_value(value))):
        one_of(field, value, built_in, custom=True)


@cache
def _field_types(cls: type) -> dict[str, tuple[Any, ...]]:
    """Returns the types that the value of each field may have."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in hints.items()
    }


def check_fields(options: Any, cls: type, prefix: str = "") -> None:
    """Raises ValueError for a field whose value is not what `cls` declares: a bool, one of the
    choices of a Literal, or within the bounds of an Annotated. Other types have checks of their
    own.

    Args:
        prefix: what stands before a field's name in the error.
    """
    for field, kinds in _field_types(cls).items():
        value = getattr(options, field)
        if value is None and type(None) in kinds:
            continue
        name = prefix + field
        for kind in kinds:
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
            if get_origin(kind) is Literal:
                one_of(name, value, get_args(kind))
            if get_origin(kind) is Annotated:
                bounds = get_args(kind)[1]
                bounds.check(name, value)


def as_dict(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, and of the dataclasses in it, as mappings. In the place of
    a user's own value is its name, because functions have no text that two processes share.
    """
    return dataclasses.asdict(
        options,
        dict_factory=lambda pairs: {
            name: value.name if is_value(value) else value for name, value in pairs
        },
    )


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_above_zero(name: str, value: float, unit: str = "") -> None:
    """Raises ValueError unless a number is above 0 and finite."""
    if not 0 < value < float("inf"):  # also refuses NaN
        unit = f" {unit}" if unit else ""
        raise ValueError(f"{name} is {value!r}; it must be above 0{unit}, and finite")


def check_model_len(length: int, longest: int) -> None:
    """Raises ValueError if max_model_len is beyond the longest text of the model."""
    if length > longest:
        raise ValueError(
            f"max_model_len is {length}, but the model was made for {longest} tokens; lower it"
        )


def one_of(name: str, value: object, allowed: tuple[Any, ...], *, custom: bool = False) -> None:
    """Raise a ValueError that lists `allowed` (and the nearest name) unless `value` is one of them.

    Args:
        custom: the caller takes a user's own value too, and the message says so.
    """
    if value not in allowed:
        close_names = difflib.get_close_matches(str(value), [str(item) for item in allowed], n=1)
        hint = f" (did you mean {close_names[0]!r}?)" if close_names else ""
        choices = ", ".join(map(repr, allowed))
        if custom:
            choices += ", or FILE.py:NAME"
        raise ValueError(f"{name} is {value!r}; it must be one of {choices}{hint}")


def from_dict(
    cls: type[Config], values: dict[str, Any], *, where: str = "", aliases: Iterable[str] = ()
) -> Config:
    """Returns a dataclass `cls` with the values of a mapping.

    Args:
        where: the prefix of a key in error messages.
        aliases: names that the caller takes beside the fields, to suggest.

    Raises:
        ValueError: an unknown key; the message suggests the nearest known one.
    """
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            close_names = difflib.get_close_matches(str(key), [*fields, *aliases], n=1)
            hint = f"known keys are {', '.join(fields)}"
            if close_names:
                hint = f"did you mean {close_names[0]!r}?"
            raise ValueError(f"unknown key {where}{key!r}; {hint}")
    return cls(**values)
