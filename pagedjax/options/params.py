"""The parameters of a request. Each class checks its values when it is created. This module imports
no jax and no numpy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from pagedjax.options import exclusions
from pagedjax.options.vllm_names.request_arguments import (
    BEAM_SEARCH,
    SAMPLING,
    STRUCTURED_OUTPUTS,
    takes,
)

NO_LIMIT = 2**31 - 1  # the value of max_tokens without a limit; max_model_len ends every request
MAX_LOGPROBS = 20
TRUNCATION_RULE = (
    "None, an integer of at least 1, or -1 for all that leaves room for one token of output"
)


def _items(value: Any) -> tuple[Any, ...]:
    """Returns a tuple of the items of a list, tuple or set, or of a single item; () for None, as in
    vLLM.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    return tuple(value)


@cache
def _types(cls: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields; its module may write them as types or as text."""
    return get_type_hints(cls)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns token ids, those of a set in ascending order. Raises ValueError for anything else."""
    items = _items(value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ValueError(f"{name} holds {item!r}; token ids are integers of at least 0")
    return tuple(sorted(items)) if isinstance(value, (set, frozenset)) else items


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(sequence, (list, tuple)) and sequence for sequence in value
    ):
        raise ValueError(
            f"bad_words_token_ids is {value!r:.80}; "
            "it must be lists of token ids, none of them empty"
        )
    return tuple(_ids("bad_words_token_ids", sequence) for sequence in value)


def _logprobs_rule(value: Any) -> str:
    """Returns what a number of log-probabilities must be, for an error message. A user of vLLM may
    write -1, which is the whole vocabulary there.
    """
    rule = f"None or an integer from 0 to {MAX_LOGPROBS}"
    if type(value) is not int:
        return rule
    return (
        f"{rule}, as a step ranks no more; "
        "for other tokens, put them at the end of a prompt with prompt_logprobs=0"
    )


def _bias(value: Any) -> dict[int, float]:
    """Returns numbers by token ids. JSON clients write the ids as strings."""
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"logit_bias is {value!r:.80}; it must map token ids to numbers") from None
    _ids("logit_bias", bias)
    return bias


def _extra_args(value: Any) -> dict[str, Any]:
    """Returns plain values by names: None, bool, int, float, str, and tuples of them. Lists become
    tuples.
    """

    def plain(name: str, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return tuple(plain(name, inner) for inner in item)
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise ValueError(
            f"extra_args[{name!r}] is {item!r:.80}; "
            "it must be a number, a string, True, False or a list"
        )

    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"extra_args is {value!r:.80}; it must map names to values")
    return {name: plain(name, item) for name, item in value.items()}


@takes(STRUCTURED_OUTPUTS)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an answer must have. Exactly one of the first five is given. Names are vLLM's.

    Every token that cannot lead to an answer of this form is forbidden. So an answer that ends by
    itself has the form, and an answer that ends by its length (finish_reason "length") is the
    beginning of an answer that has it.

    Attributes:
        json: a JSON schema: a mapping, its text, or a pydantic model. Unsupported keywords are
            errors (docs/design/structured-outputs.md).
        regex: a regular expression of the whole answer, in Rust's syntax, without look-around.
        choice: the answer is one of these texts.
        grammar: a context-free grammar, in Lark's syntax or as GBNF.
        json_object: the answer is any JSON object.
        ignore_unsupported: JSON-schema keywords that are not supported are ignored, and are no
            errors.
        disable_any_whitespace: JSON without white space. Otherwise there are at most 16 characters
            of it in one place.
        disable_additional_properties: as if each object of the schema had `additionalProperties:
            false`.
        whitespace_pattern: a regular expression of the white space between JSON's tokens.

    Raises:
        ValueError: none of the forms, or several of them; or a value of another type. The message
            names it.
    """

    json: str | Mapping[str, Any] | type | None = None  # kept as text
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    ignore_unsupported: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _items(self.choice))
        forms = ("json", "regex", "choice", "grammar", "json_object")
        present = [name for name in forms if getattr(self, name) not in (None, False)]
        if len(present) != 1:
            names = " and ".join(present) if present else "nothing"
            raise ValueError(
                f"structured_outputs has {names}; give exactly one of {', '.join(forms)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(
                    f"structured_outputs.{name} is {value!r:.80}; "
                    "it must be a text that is not empty"
                )
        if self.choice is not None:
            are_texts = all(isinstance(text, str) and text for text in self.choice)
            if not self.choice or not are_texts:
                raise ValueError(
                    f"structured_outputs.choice is {self.choice!r:.80}; "
                    "it must be a list of texts, none of them empty"
                )
        for name in (
            "ignore_unsupported",
            "disable_any_whitespace",
            "disable_additional_properties",
            "json_object",
        ):
            value = getattr(self, name)
            may_be_none = name == "json_object"
            if not (isinstance(value, bool) or (may_be_none and value is None)):
                raise ValueError(
                    f"structured_outputs.{name} is {value!r:.80}; it must be True or False"
                )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                "structured_outputs has disable_any_whitespace and whitespace_pattern; "
                "give one of them"
            )


def _schema_text(schema: Any) -> str:
    """Returns the text of a JSON schema."""
    if isinstance(schema, str):
        return schema
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        schema = schema.model_json_schema()
    if not isinstance(schema, Mapping):
        raise ValueError(
            f"structured_outputs.json is {schema!r:.80}; "
            "it must be a JSON schema: a mapping, its text, or a pydantic model"
        )
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json cannot be written as JSON: {error}") from None


def _layers(name: str, value: Any) -> tuple[int, ...]:
    """Returns layers or heads in ascending order, each once."""
    items = _items(value)
    for item in items:
        if type(item) is not int or item < 0:
            raise ValueError(
                f"taps.{name} holds {item!r:.80}; layers and heads are integers of at least 0"
            )
    return tuple(sorted(set(items)))


@dataclass(frozen=True)
class Taps:
    """The internal values of the model that a request returns with its tokens: docs/design/taps.md.
    None or () is none.

    Attributes:
        hidden_states: the hidden states to return, for every token that is computed. They are
            counted as in transformers' `output_hidden_states`: 0 is the input of the first layer, i
            is the output of layer i - 1, and the number of layers is the output of the last layer
            after the final norm.
        attention: query heads by layer: {3: (0, 1)} or ((3, (0, 1)),). For each output token, these
            are the weights that the token before it gives to the values of its context.
        experts: layers with a mixture of experts. For every token that is computed, these are the
            chosen experts and their weights.

    Raises:
        ValueError: a value that is no layer or head; a layer twice, or without heads. The message
            names it.
    """

    hidden_states: tuple[int, ...] = ()
    attention: tuple[tuple[int, tuple[int, ...]], ...] = ()
    experts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_states", "experts"):
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        attention: Any = self.attention
        pairs = attention.items() if isinstance(attention, Mapping) else _items(attention)
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                f"taps.attention is {attention!r:.80}; "
                "it must be heads by layer, such as {3: (0, 1)}"
            )
        layers = _layers("attention", [layer for layer, _ in pairs])
        heads = {layer: _layers("attention", items) for layer, items in pairs}
        if len(layers) < len(pairs) or not all(heads.values()):
            raise ValueError(
                f"taps.attention is {attention!r:.80}; "
                "name each layer once, and at least one of its heads"
            )
        object.__setattr__(self, "attention", tuple((layer, heads[layer]) for layer in layers))

    def __bool__(self) -> bool:
        return bool(self.hidden_states or self.attention or self.experts)

    @property
    def of_every_token(self) -> bool:
        """Whether the taps need every token, also those that no output token follows."""
        return bool(self.hidden_states or self.experts)


@takes(SAMPLING)
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and defaults are vLLM's
    (docs/design/vllm.md).

    The order of operations on the logits is vLLM's: structured_outputs, allowed_token_ids, bad
    words, logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p. `temperature=0` is
    greedy. `top_k` of 0 or -1 is off. `best_of` branches are generated, and the n with the largest
    summed log-probability are returned; None is n. `max_tokens=None` ends a request at
    max_model_len.

    Raises:
        ValueError: a value out of its range; the message names the value and the range.
        TypeError: an argument that does not exist; the message names the nearest one, or the
            alternative.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    # texts that are not generated, with and without a space before them
    bad_words: str | tuple[str, ...] = ()
    # the same as token ids: no output contains one of these sequences
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    # only so many of the prompt's last tokens are used; -1: max_model_len - 1
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    # False: the request neither uses cached blocks nor leaves any in the cache
    enable_prefix_caching: bool = True
    cache_salt: str | None = None  # blocks are shared only with requests of the same salt
    structured_outputs: StructuredOutputsParams | None = None
    # for the engine's `row_features`, by the names that they declare
    extra_args: Mapping[str, Any] | None = None
    taps: Taps | None = None  # hidden states, attention and experts to return with the output
    # the tokens of the output, in place of sampled ones, a decode step each; nothing ends it before
    # the last one. Their log-probabilities and ranks are those under the model's own distribution.
    trace_decode_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # normalises the form of a value, never its meaning
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("stop", _items(self.stop))
        put("bad_words", _items(self.bad_words))
        put("bad_words_token_ids", _sequences(self.bad_words_token_ids))
        if self.max_tokens is None:
            put("max_tokens", NO_LIMIT)
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        if self.trace_decode_token_ids is not None:
            token_ids = _ids("trace_decode_token_ids", self.trace_decode_token_ids)
            put("trace_decode_token_ids", token_ids)
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))
        if self.extra_args is not None:
            put("extra_args", _extra_args(self.extra_args))
        if not (self.taps is None or isinstance(self.taps, Taps)):
            raise ValueError(f"taps is {self.taps!r:.80}; it must be None or Taps(...)")
        put("taps", self.taps or None)

        for name, kind in _types(type(self)).items():
            value = getattr(self, name)
            if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r}; it must be an integer")
            if kind is float and (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
            ):
                raise ValueError(f"{name} is {value!r}; it must be a finite number")
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")

        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        check(self.n >= 1, "n", "at least 1")
        best = self.best_of
        rule = f"None, or an integer of at least n ({self.n})"
        check(best is None or (type(best) is int and best >= self.n), "best_of", rule)
        check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 (greedy) and 2")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1 (1 is off)")
        check(-1 <= self.top_k < 2**31, "top_k", "from 1 to 2**31 - 1, or 0 / -1 for off")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 (off) and 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(
            0.01 <= self.repetition_penalty <= 2.0,
            "repetition_penalty",
            "between 0.01 and 2 (1 is off)",
        )
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"between 0 and max_tokens ({self.max_tokens})",
        )
        check(
            self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**32),
            "seed",
            "None or in [0, 2**32)",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ranked = value is None or (type(value) is int and 0 <= value <= MAX_LOGPROBS)
            check(ranked, name, _logprobs_rule(value))
        check(
            all(isinstance(text, str) and text for text in self.stop),
            "stop",
            "a non-empty string or several of them",
        )
        check(
            self.detokenize or not self.stop,
            "stop",
            "empty when detokenize is False: it matches text",
        )
        words = all(isinstance(word, str) and word.strip() for word in self.bad_words)
        check(words, "bad_words", "a word or several of them, and no word is empty")
        cut = self.truncate_prompt_tokens
        check(
            cut is None or (type(cut) is int and (cut >= 1 or cut == -1)),
            "truncate_prompt_tokens",
            TRUNCATION_RULE,
        )
        salt = self.cache_salt
        check(
            salt is None or (isinstance(salt, str) and salt != ""),
            "cache_salt",
            "None or a non-empty string",
        )
        for name in ("allowed_token_ids", "trace_decode_token_ids"):
            check(getattr(self, name) != (), name, "None or non-empty")
        form = self.structured_outputs
        rule = "None or a StructuredOutputsParams"
        check(form is None or isinstance(form, StructuredOutputsParams), "structured_outputs", rule)
        if form is not None:  # each of these could forbid every token that the form allows
            check(
                self.min_tokens == 0,
                "min_tokens",
                "0 with structured_outputs, whose form says where an answer ends",
            )
            check(
                not self.ignore_eos,
                "ignore_eos",
                "False with structured_outputs, which end by the EOS token",
            )
            rule = "None with structured_outputs; describe the answer by the form alone"
            check(self.allowed_token_ids is None, "allowed_token_ids", rule)
            rule = "empty with structured_outputs; describe the answer by the form alone"
            for name in ("bad_words", "bad_words_token_ids"):
                check(getattr(self, name) == (), name, rule)
        bias = self.logit_bias or {}
        check(
            all(-100.0 <= number <= 100.0 for number in bias.values()),
            "logit_bias",
            "between -100 and 100 for every token",
        )
        exclusions.refuse(self, exclusions.SAMPLING)

    def drawn(self) -> SamplingParams:
        """Returns the parameters to run: with `best_of` branches, and with the log-probabilities
        that the choice among them needs; with given tokens, as many as there are, whatever the
        limits and stop strings are.
        """
        if self.trace_decode_token_ids is not None:
            count = len(self.trace_decode_token_ids)
            return replace(self, max_tokens=count, min_tokens=0, stop=())
        if self.best_of is None or self.best_of == self.n:
            return self
        return replace(
            self,
            n=self.best_of,
            best_of=None,
            logprobs=0 if self.logprobs is None else self.logprobs,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@takes(BEAM_SEARCH)
@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search: at every position, the search keeps the `beam_width` best continuations of all
    beams (see host/searches/beams.py).

    The scores and the end of the search are those of transformers'
    `generate(num_beams=beam_width)`: a sequence of m tokens scores (sum of its log-probabilities) /
    m ** length_penalty, and its stop token counts.

    Attributes:
        n: how many of the best sequences are returned; None is all, `beam_width`.
        early_stopping: when the search ends. False: when the best beam, at its present length,
            cannot beat the worst finished sequence. True: as soon as `beam_width` sequences are
            finished. "never": when no beam could win at any length.

    Raises:
        ValueError, TypeError: as of `SamplingParams`.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    enable_prefix_caching: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        width = self.beam_width
        penalty = self.length_penalty
        n = self.n
        if type(width) is not int or width < 1:
            raise ValueError(f"beam_width is {width!r}; it must be an integer of at least 1")
        if (
            isinstance(penalty, bool)
            or not isinstance(penalty, (int, float))
            or not math.isfinite(penalty)
        ):
            raise ValueError(
                f"length_penalty is {penalty!r}; it must be a finite number (0 is off)"
            )
        # with a larger exponent, a power of a length leaves the range of floats
        if not -10.0 <= penalty <= 10.0:
            raise ValueError(
                f"length_penalty is {penalty!r}; it must be between -10 and 10 (0 is off)"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f"early_stopping is {self.early_stopping!r}; it must be False, True or 'never'"
            )
        if n is not None and (type(n) is not int or not 1 <= n <= width):
            raise ValueError(
                f"n is {n!r}; it must be None, or an integer from 1 to beam_width ({width})"
            )
        self.row(1)  # checks the other fields

    def row(self, top: int) -> SamplingParams:
        """Returns the parameters of each beam's row. The search chooses by its `top`
        log-probabilities.
        """
        return SamplingParams(
            temperature=0.0,
            logprobs=top,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
            enable_prefix_caching=self.enable_prefix_caching,
            cache_salt=self.cache_salt,
        )


PoolingTask = Literal["embed", "token_embed"]
PoolingType = Literal["LAST", "MEAN", "CLS"]
NO_HEAD = "models here have no head for classes or rewards"


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt, after the last norm, become vectors. Nothing is sampled.
    Names are vLLM's.

    Attributes:
        task: "embed" gives one vector for a prompt, "token_embed" one for each token; None is the
            task of the method that is called.
        pooling_type: of "embed": the state of the last token ("LAST"), the mean of all ("MEAN") or
            that of the first ("CLS"); None is the model's own, if its files name one, else "LAST".
            In vLLM it belongs to the engine.
        normalize: divide each vector by its length; None is True. `use_activation` is its newer
            name.
        dimensions: keep only so many of the first numbers of each vector, before it is normalised;
            None is all.
        truncate_prompt_tokens: keep only so many of the last tokens of a longer prompt; -1 is
            `max_model_len`.

    Raises:
        ValueError: a value out of its range, or one that needs another kind of model.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    pooling_type: PoolingType | None = None
    truncate_prompt_tokens: int | None = None
    enable_prefix_caching: bool = True
    cache_salt: str | None = None
    softmax: InitVar[Any] = None
    activation: InitVar[Any] = None
    step_tag_id: InitVar[Any] = None
    returned_token_ids: InitVar[Any] = None
    n = 1  # no fields, but attributes that metrics and sessions read of all parameters
    max_tokens = 0

    def __post_init__(
        self, softmax: Any, activation: Any, step_tag_id: Any, returned_token_ids: Any
    ) -> None:
        options_of_heads = {
            "softmax": softmax,
            "activation": activation,
            "step_tag_id": step_tag_id,
            "returned_token_ids": returned_token_ids,
        }
        for name, value in options_of_heads.items():
            if value is not None:
                raise ValueError(f"{name} is {value!r:.80}, but {NO_HEAD}; leave it out")
        if self.task is not None and self.task not in get_args(PoolingTask):
            raise ValueError(
                f"task is {self.task!r:.80}; it must be 'embed' or 'token_embed': {NO_HEAD}"
            )
        if self.pooling_type is not None and self.pooling_type not in get_args(PoolingType):
            raise ValueError(
                f"pooling_type is {self.pooling_type!r:.80}; it must be 'LAST', 'MEAN' or 'CLS'"
            )
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, bool)):
                raise ValueError(f"{name} is {value!r:.80}; it must be None, True or False")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r:.80}; "
                "it must be True or False"
            )
        if (
            None not in (self.normalize, self.use_activation)
            and self.normalize != self.use_activation
        ):
            raise ValueError(
                "normalize and use_activation mean the same, and they differ; give one of them"
            )
        for name, minimum in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum or value == 0):
                alternative = ", or -1 for the model's length" if minimum < 0 else ""
                raise ValueError(
                    f"{name} is {value!r:.80}; "
                    f"it must be None, an integer of at least 1{alternative}"
                )
        self.row()  # checks the other fields

    @property
    def kind(self) -> Literal["LAST", "MEAN", "CLS", "ALL"]:
        """The tokens whose hidden states are pooled; "ALL": a vector for each token."""
        return "ALL" if self.task == "token_embed" else self.pooling_type or "LAST"

    @property
    def normalized(self) -> bool:
        return self.use_activation is not False and self.normalize is not False

    def row(self) -> SamplingParams:
        """Returns the parameters of the prompt's row in a step. Tokens in the prefix cache have no
        hidden states. So only "LAST" may use the cache, because the last token is always computed.
        """
        return SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            enable_prefix_caching=self.enable_prefix_caching and self.kind == "LAST",
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request (docs/design/adapters.md), under vLLM's names.

    Attributes:
        lora_name: its name in the engine. An adapter that is loaded under this name is used, unless
            `lora_path` is another folder.
        lora_int_id: its number in vLLM; nothing here depends on it.
        lora_path: its folder, as PEFT saves it; "" is an adapter that is loaded already.
        load_inplace: read the folder again, because its files may have changed.
        base_model_name: for people; nothing depends on it.

    Raises:
        ValueError: a name or path that is no text, or a number below 1.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    load_inplace: bool = False
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(
                f"lora_name is {self.lora_name!r:.80}; it must be a text that is not empty"
            )
        if not isinstance(self.lora_path, str):
            raise ValueError(f"lora_path is {self.lora_path!r:.80}; it must be a folder")
        if self.lora_path:  # one form of the path for the same folder
            object.__setattr__(
                self, "lora_path", os.path.normpath(os.path.expanduser(self.lora_path))
            )
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id is {self.lora_int_id!r:.80}; it must be an integer of at least 1"
            )
