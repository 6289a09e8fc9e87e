"""The arguments of vLLM's `SamplingParams` and `BeamSearchParams` (0.33, and older names), and what
happens to each."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pagedjax.vllm_names.rows import Row, by_name, nothing, read, refused, taken

Params = TypeVar("Params")

SAMPLING = (
    taken(
        "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
        "seed stop "
        "stop_token_ids ignore_eos min_tokens logit_bias allowed_token_ids bad_words "
        "include_stop_str_in_output "
        "skip_special_tokens detokenize extra_args best_of truncate_prompt_tokens "
        "structured_outputs",
        "the same",
    ),
    taken("max_tokens", "the same; None ends a request at `max_model_len`"),
    taken("logprobs prompt_logprobs", "0 to 20; -1, the whole vocabulary, is refused"),
    taken(
        "skip_reading_prefix_cache",
        "`enable_prefix_caching=False`",
        lambda _, value: {"enable_prefix_caching": False} if value else {},
    ),
    nothing(
        "output_kind stream_interval skip_clone output_text_buffer_length "
        "spaces_between_special_tokens "
        "routed_experts_prompt_start _eos_token_id _all_stop_token_ids _bad_words_token_ids "
        "_watermarking_skipped",
        "outputs have one form: whole, or the text of `LLM.stream`",
    ),
    refused(
        "guided_decoding guided_json guided_regex guided_choice guided_grammar response_format",
        "use structured_outputs=StructuredOutputsParams(json=...), or its regex, choice or grammar",
    ),
    refused(
        "logits_processors",
        "write a RowFeature, give it as LLM(logits_processors=...), and set extra_args",
    ),
    refused(
        "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start",
        "put a token at the end of the prompt, and set prompt_logprobs=0",
    ),
    refused("flat_logprobs", "log-probabilities are mappings by token id; leave it out"),
    refused("use_beam_search early_stopping length_penalty", "use BeamSearchParams"),
    refused("thinking_token_budget repetition_detection", "use max_tokens or stop"),
    refused("trace_decode_token_ids", "put the tokens into the prompt, and set prompt_logprobs"),
    refused("watermarking", "no output has a mark; leave it out"),
)
BEAM_SEARCH = (
    taken(
        "beam_width max_tokens ignore_eos length_penalty include_stop_str_in_output "
        "skip_special_tokens",
        "the same",
    ),
    refused("temperature", "scores are those of the model; leave it out"),
    refused(
        "structured_outputs allowed_token_ids",
        "a search ranks the whole vocabulary; use SamplingParams",
    ),
    refused("watermarking", "no output has a mark; leave it out"),
)

STRUCTURED_OUTPUTS = (
    taken(
        "json regex choice grammar json_object disable_any_whitespace "
        "disable_additional_properties whitespace_pattern",
        "the same",
    ),
    nothing("disable_fallback", "there is one backend"),
    refused("structural_tag", "write it as a grammar"),
)


def takes(rows: tuple[Row, ...]) -> Callable[[type[Params]], type[Params]]:
    """Let a dataclass take the arguments of the rows beside its fields. An error of an unknown one
    names a near one.

    The check is around `__init__`, so `dataclasses.replace`, positions and type checkers see the
    dataclass as it is.
    """
    table = by_name(rows)

    def decorate(cls: type[Params]) -> type[Params]:
        init = cls.__init__
        fields = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

        @functools.wraps(init)
        def checked(self: Params, *args: Any, **kwargs: Any) -> None:
            if not kwargs.keys() <= fields:
                kwargs = _with_fields(cls.__name__, kwargs, fields, table)
            init(self, *args, **kwargs)

        cls.__init__ = checked
        return cls

    return decorate


def _with_fields(
    cls: str, given: Mapping[str, Any], fields: frozenset[str], table: Mapping[str, Row]
) -> dict[str, Any]:
    """The arguments as fields.

    Raises:
        TypeError: a name that is neither a field nor in the table, or one that is refused.
    """
    own = {name: value for name, value in given.items() if name in fields}
    others = {name: value for name, value in given.items() if name not in fields}
    for name in others:
        if name not in table:
            near = difflib.get_close_matches(name, [*fields, *table], n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"its arguments are {', '.join(sorted(fields))}"
            )
            raise TypeError(f"{cls} has no argument {name!r}; {hint}")
    return read(others, {name: table[name] for name in others}, TypeError) | own
