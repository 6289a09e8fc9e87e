"""What happens to each argument of vLLM's `SamplingParams` and `BeamSearchParams`.

The names are those of vLLM 0.33, and older ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pagedjax.options.vllm_names.rows import Row, by_name, no_effect, read, refusal, translation

Params = TypeVar("Params")

SAMPLING = (
    translation(
        "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
        "seed stop stop_token_ids ignore_eos min_tokens logit_bias allowed_token_ids bad_words "
        "include_stop_str_in_output skip_special_tokens detokenize extra_args best_of "
        "truncate_prompt_tokens structured_outputs",
        "the same",
    ),
    translation("max_tokens", "the same; None ends a request at `max_model_len`"),
    translation("logprobs prompt_logprobs", "0 to 20; -1, the whole vocabulary, is refused"),
    translation("trace_decode_token_ids", "the same; also with prompt_logprobs, and with drafts"),
    translation(
        "skip_reading_prefix_cache",
        "`enable_prefix_caching=False`",
        lambda _, value: {"enable_prefix_caching": False} if value else {},
    ),
    no_effect(
        "output_kind stream_interval skip_clone output_text_buffer_length "
        "spaces_between_special_tokens routed_experts_prompt_start _eos_token_id "
        "_all_stop_token_ids _bad_words_token_ids _watermarking_skipped",
        "outputs have one form: whole, or the text of `LLM.stream`",
    ),
    refusal(
        "guided_decoding guided_json guided_regex guided_choice guided_grammar response_format",
        "use structured_outputs=StructuredOutputsParams(json=...), or its regex, choice or grammar",
    ),
    refusal(
        "logits_processors",
        "write a RowFeature, give it as LLM(logits_processors=...), and set extra_args",
    ),
    refusal(
        "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start",
        "put a token at the end of the prompt, and set prompt_logprobs=0",
    ),
    refusal("flat_logprobs", "log-probabilities are mappings by token id; leave it out"),
    refusal("use_beam_search early_stopping length_penalty", "use BeamSearchParams"),
    refusal("thinking_token_budget repetition_detection", "use max_tokens or stop"),
    refusal("watermarking", "no output has a mark; leave it out"),
)
BEAM_SEARCH = (
    translation(
        "beam_width max_tokens ignore_eos length_penalty include_stop_str_in_output "
        "skip_special_tokens",
        "the same",
    ),
    refusal("temperature", "scores are those of the model; leave it out"),
    refusal(
        "structured_outputs allowed_token_ids",
        "a search ranks the whole vocabulary; use SamplingParams",
    ),
    refusal("watermarking", "no output has a mark; leave it out"),
)

STRUCTURED_OUTPUTS = (
    translation(
        "json regex choice grammar json_object disable_any_whitespace "
        "disable_additional_properties whitespace_pattern",
        "the same",
    ),
    no_effect("disable_fallback", "there is one backend"),
    refusal("structural_tag", "write it as a grammar"),
)


def takes(rows: tuple[Row, ...]) -> Callable[[type[Params]], type[Params]]:
    """Decorate a dataclass so that it takes the arguments of `rows` as well as its fields.

    The error of an unknown argument names a similar one.
    The check is around `__init__`, so `dataclasses.replace`, positions and type checkers see the
    dataclass as it is.
    """
    table = by_name(rows)

    def decorate(cls: type[Params]) -> type[Params]:
        init = cls.__init__
        names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        fields = frozenset(names)

        @functools.wraps(init)
        def translate_and_init(self: Params, *args: Any, **kwargs: Any) -> None:
            if not kwargs.keys() <= fields:
                kwargs = _fields_of(cls.__name__, kwargs, fields, table)
            init(self, *args, **kwargs)

        cls.__init__ = translate_and_init
        return cls

    return decorate


def _fields_of(
    cls: str, arguments: Mapping[str, Any], fields: frozenset[str], table: Mapping[str, Row]
) -> dict[str, Any]:
    """The values of fields that the arguments ask for.

    Raises:
        TypeError: a name that is neither a field nor in the table, or one that is refused.
    """
    values = {name: value for name, value in arguments.items() if name in fields}
    of_vllm = {name: value for name, value in arguments.items() if name not in fields}
    for name in of_vllm:
        if name not in table:
            similar = difflib.get_close_matches(name, [*fields, *table], n=1)
            hint = f"its arguments are {', '.join(sorted(fields))}"
            if similar:
                hint = f"did you mean {similar[0]!r}?"
            raise TypeError(f"{cls} has no argument {name!r}; {hint}")
    return read(of_vllm, {name: table[name] for name in of_vllm}, TypeError) | values
