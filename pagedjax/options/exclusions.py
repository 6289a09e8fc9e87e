"""Options that exclude each other: each pair once, with the reason and the remedy. This module
imports no jax.

What depends on the model or on the devices is checked where these are known: `engine/resolve.py`,
`engine/geometry.py`, `engine/adapters.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Exclusion(NamedTuple):
    """Two options that no engine can have together.

    options: the two fields. meet: whether a configuration has both. error: what its user reads;
    `{config.NAME}` is the value of a field.
    """

    options: tuple[str, str]
    meet: Callable[[Any], bool]
    error: str


def _drafts_on_device(config: Any) -> bool:
    return config.speculative is not None and config.speculative.on_device


ENGINE = (  # of an `EngineConfig`
    Exclusion(
        ("lookahead", "speculative"),
        lambda config: config.lookahead and config.speculative,
        "lookahead is {config.lookahead} and speculative is {config.speculative.method!r}: a draft "
        "follows known tokens, and lookahead sends a step before they are known; set lookahead=0, "
        "or speculative=None",
    ),
    Exclusion(
        ("decode_span", "speculative"),
        lambda config: config.decode_span > 1 and config.speculative,
        "decode_span is {config.decode_span} and speculative is {config.speculative.method!r}: a "
        "draft follows known tokens, and the tokens of a span are known at its end; set "
        "decode_span=1, or speculative=None",
    ),
    Exclusion(
        ("late_stops", "speculative"),
        lambda config: config.late_stops and config.speculative,
        "late_stops is True and speculative is {config.speculative.method!r}: a draft follows known "
        "tokens, and a late plan is made before they are known; set late_stops=False, or "
        "speculative=None",
    ),
    Exclusion(
        ("decode_span", "kv_policy"),
        lambda config: config.decode_span > 1 and config.kv_policy is not None,
        "decode_span is {config.decode_span} and kv_policy is {config.kv_policy.name!r}, whose "
        "rows of attention the host makes for each step; set decode_span=1, or kv_policy='full'",
    ),
    Exclusion(
        ("decode_span", "batch_invariant"),
        lambda config: config.decode_span > 1 and config.batch_invariant,
        "decode_span is {config.decode_span} and batch_invariant is True: a span is another "
        "program, which need not have the bits of single steps; set one of them to its default",
    ),
    Exclusion(
        ("batch_invariant", "speculative.rule"),
        lambda config: (
            config.batch_invariant
            and config.speculative is not None
            and config.speculative.rule == "rejection"
        ),
        "batch_invariant is True and speculative.rule is 'rejection', with which a token depends on "
        "its draft; set speculative.rule='strict', or batch_invariant=False",
    ),
    Exclusion(
        ("kv_policy", "reservation"),
        lambda config: config.kv_policy is not None and config.is_baseline,
        "kv_policy is {config.kv_policy.name!r}, and reservation is {config.reservation!r}, "
        "chunked_prefill {config.chunked_prefill} and mixed_steps {config.mixed_steps}: these "
        "baselines keep every block; set reservation='none' and both others to True, or "
        "kv_policy='full'",
    ),
    Exclusion(
        ("kv_policy", "speculative.method"),
        lambda config: config.kv_policy is not None and _drafts_on_device(config),
        "kv_policy is {config.kv_policy.name!r} and speculative.method is "
        "{config.speculative.method!r}, whose model reads every block of a sequence; use the method "
        "'ngram' or 'suffix', or kv_policy='full'",
    ),
    Exclusion(
        ("enable_lora", "speculative.method"),
        lambda config: config.enable_lora and _drafts_on_device(config),
        "enable_lora is True and speculative.method is {config.speculative.method!r}, whose model "
        "has no adapters; use the method 'ngram' or 'suffix', or enable_lora=False",
    ),
    Exclusion(
        ("enable_lora", "mesh"),
        lambda config: config.enable_lora and (config.mesh or config.devices),
        "enable_lora is True, mesh {config.mesh} and devices {config.devices}: adapters are on the "
        "first device alone; leave mesh and devices out, or merge the adapter into the weights",
    ),
    Exclusion(
        ("reservation", "enable_prefix_caching"),
        lambda config: config.reservation != "none" and config.enable_prefix_caching,
        "reservation is {config.reservation!r}, which shares no blocks, but enable_prefix_caching "
        "is True; set enable_prefix_caching=False, or reservation='none'",
    ),
    Exclusion(
        ("compilation", "speculative"),
        lambda config: config.compilation == "background" and config.speculative,
        "compilation is 'background' and speculative is {config.speculative.method!r}, whose number "
        "of drafts follows the times of steps of each size; set compilation='eager', or "
        "speculative=None",
    ),
)

SPECULATIVE = (  # of a `Speculative`
    Exclusion(
        ("speculative.rule", "speculative.method"),
        lambda config: config.rule == "rejection" and config.method == "suffix",
        "speculative.rule is 'rejection' and speculative.method is 'suffix', which learns from "
        "other requests: with equal seeds their tokens have the same random numbers, and outputs "
        "would be biased; use the rule 'strict', or another method",
    ),
    Exclusion(
        ("speculative.model", "speculative.method"),
        lambda config: config.model is not None and not config.on_device,
        "speculative.model is {config.model!r}, and the drafter {config.method!r} has no model; "
        "leave it out, or use a method of draft, eagle",
    ),
    Exclusion(
        ("speculative.weight_dtype", "speculative.method"),
        lambda config: config.weight_dtype is not None and config.method != "draft",
        "speculative.weight_dtype is {config.weight_dtype!r}, and the drafter {config.method!r} "
        "has no checkpoint of a model; leave it out, or use the method 'draft'",
    ),
)


def _with_given_tokens(option: str, reason: str) -> Exclusion:
    """An option that a request whose tokens are given cannot have."""

    def meet(params: Any) -> bool:
        unset_values = (getattr(type(params), option), 1)  # 1 of `best_of`
        is_set = getattr(params, option) not in unset_values
        return params.trace_decode_token_ids is not None and is_set

    return Exclusion(
        ("trace_decode_token_ids", option),
        meet,
        f"trace_decode_token_ids is given and {option} is {{config.{option}!r:.80}}, {reason}; "
        "leave one of them out",
    )


_ONE_OUTPUT = "and all branches would have the same tokens"
_FORBIDS = "which may forbid one of the tokens"
SAMPLING = (  # of a `SamplingParams`
    _with_given_tokens("n", _ONE_OUTPUT),
    _with_given_tokens("best_of", _ONE_OUTPUT),
    _with_given_tokens("structured_outputs", _FORBIDS),
    _with_given_tokens("allowed_token_ids", _FORBIDS),
    _with_given_tokens("bad_words", _FORBIDS),
    _with_given_tokens("bad_words_token_ids", _FORBIDS),
)


def refuse(config: Any, exclusions: tuple[Exclusion, ...]) -> None:
    """Raises ValueError if options of `config` exclude each other. Each of them alone is valid."""
    for exclusion in exclusions:
        if exclusion.meet(config):
            raise ValueError(exclusion.error.format(config=config))
