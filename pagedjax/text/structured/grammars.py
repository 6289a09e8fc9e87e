"""From `StructuredOutputsParams` to a `Grammar`.

It imports llguidance when the first one is compiled.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.imports import imported
from pagedjax.text.structured import keywords, vocabulary
from pagedjax.text.structured.matcher import Grammar, first_line
from pagedjax.text.structured.regular import beyond
from pagedjax.text.surrogates import check_whole
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer

KEPT = 64  # compiled grammars, those that were used last
# Characters of a form at most, so that compiling takes less than a second. A grammar may be
# translated in Python.
MAX_TEXT = {"json": 2**17, "choice": 2**17, "grammar": 2**16, "regex": 2**14}
# Between JSON's tokens: without a limit a model could write white space for ever
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,16}"
JSON_SPACE = r"[\x20\x0A\x0D\x09]*"
LOCATED = 500  # schemas in a schema up to which the place of an error is looked for
# Limits of llguidance's parser. An answer that exceeds one is cancelled, and never ends as if it
# was complete.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 50_000, "max_grammar_size": 200_000}
EXTRA = "structured outputs need llguidance; install the extra: pip install 'pagedjax[structured]'"


class Grammars:
    """Compiles and keeps grammars for one tokenizer and one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def compiled(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form.

        Raises:
            ValueError: llguidance is missing, the model has no tokenizer or no EOS token, or the
                form cannot be compiled.
        """
        with self._lock:
            grammar = self._kept.get(form)
            if grammar is not None:
                self._kept.move_to_end(form)
                return grammar
        text, ignored = grammar_text(form, vocabulary.marks(self.tokenizer))
        grammar = self._checked(text, form, ignored)
        with self._lock:
            self._kept[form] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _checked(
        self, text: str, form: StructuredOutputsParams, ignored: tuple[str, ...]
    ) -> Grammar:
        library = _library()
        known_vocabulary = self._known_vocabulary()
        limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
        start = library.LLMatcher(known_vocabulary, text, log_level=0, limits=limits)
        if not start.is_error():
            first = start.compute_bitmask()
            if not start.is_error() and not any(first):
                raise ValueError(f"structured_outputs.{_form(form)} allows no answer at all")
        if start.is_error():
            message = first_line(start.get_error())
            place = _place(form, message, known_vocabulary) if _form(form) == "json" else ""
            raise ValueError(f"structured_outputs.{_form(form)} cannot be used{place}: {message}")
        return Grammar(start, -(-self.vocab_size // 32), ignored, self.eos_token_ids)

    def _known_vocabulary(self) -> Any:
        """llguidance's view of the tokenizer."""
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError("structured_outputs constrain text, and this model has no tokenizer")
        if not self.eos_token_ids:
            raise ValueError(
                "structured_outputs end by an EOS token, and this model has none; "
                "name it in its config"
            )
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = vocabulary.library_tokenizer(
                        _library(), self.tokenizer, self.vocab_size, self.eos_token_ids
                    )
                except ValueError as error:
                    raise ValueError(
                        f"structured_outputs cannot use this model's tokenizer: {error}"
                    ) from error
            return self._vocabulary


def _library() -> Any:
    try:
        return imported("llguidance")
    except ModuleNotFoundError as error:
        raise ValueError(EXTRA) from error


def _form(form: StructuredOutputsParams) -> str:
    names = ("json", "regex", "choice", "grammar", "json_object")
    return next(name for name in names if getattr(form, name) not in (None, False))


def grammar_text(
    form: StructuredOutputsParams, marks: Mapping[str, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """llguidance's text of a form's grammar, and the keywords that are ignored.

    Args:
        marks: the tokens that a Lark grammar may name, by their names.

    Raises:
        ValueError: too long, no JSON, a keyword that is not supported, or a grammar that cannot be
            read.
    """
    library = _library()
    name = _form(form)
    value = getattr(form, name)
    length = 0
    if isinstance(value, (str, tuple)):
        length = sum(map(len, value))
    limit = MAX_TEXT.get(name, 0)
    if length > limit:
        raise ValueError(
            f"structured_outputs.{name} has {length} characters; the limit is {limit}; "
            "make it shorter"
        )
    if name == "regex":
        return library.LLMatcher.grammar_from_regex(value), ()
    if name == "choice":
        return library.grammar_from("choice", json.dumps(value)), ()
    if name == "grammar":
        assert isinstance(value, str)
        try:
            return library.grammar_from("grammar", vocabulary.by_id(value, marks or {})), ()
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs.grammar cannot be read: {first_line(str(error))}"
            ) from error
    schema, ignored = ({"type": "object"}, ()) if name == "json_object" else schema_of(form)
    if form.whitespace_pattern is not None:
        _check_white_space(form.whitespace_pattern)
    options = {"whitespace_pattern": form.whitespace_pattern or WHITE_SPACE, "lenient": False}
    if form.disable_any_whitespace:
        options = {"whitespace_flexible": False, "lenient": False}
    return library.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=options
    ), ignored


def _check_white_space(pattern: str) -> None:
    """Raises ValueError for a pattern of more than JSON's white space: answers would be no JSON."""
    problem = f"structured_outputs.whitespace_pattern is {pattern!r:.80}"
    try:
        start = beyond(pattern, JSON_SPACE)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    if start is not None:
        example = f"texts that begin with {start!r}"
        raise ValueError(
            f"{problem}, which allows {example} and are no white space of JSON; use [ \\t\\n\\r] alone"
        )


def schema_of(form: StructuredOutputsParams) -> tuple[Any, tuple[str, ...]]:
    """The schema that is compiled, and the keywords that it has lost."""
    assert isinstance(form.json, str)
    try:
        schema = json.loads(form.json)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
    check_whole("structured_outputs.json", schema)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(
            f"structured_outputs.json is {form.json!r:.80}; a schema is an object, true or false"
        )
    if schema is False:
        raise ValueError("structured_outputs.json is false, and the schema false allows no answer")
    schema = {} if schema is True else schema
    how = "ignore_unsupported (strict: false in response_format)"
    schema, places = keywords.checked(
        schema, "structured_outputs.json", ignore=how, ignored=form.ignore_unsupported
    )
    if form.disable_additional_properties:
        schema = keywords.closed(schema)
    return schema, places


def _place(form: StructuredOutputsParams, message: str, known_vocabulary: Any) -> str:
    """Returns where the smallest schema is that gives the same error by itself; "" without one."""
    library = _library()
    place_of_smallest = ""
    schemas = list(islice(keywords.subschemas(schema_of(form)[0]), LOCATED + 1))
    if len(schemas) > LOCATED:
        return place_of_smallest
    limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
    for place, schema in schemas:
        text = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        error = library.LLMatcher.validate_grammar(text, known_vocabulary, limits=limits)
        if error and first_line(error) == message and len(place) >= len(place_of_smallest):
            place_of_smallest = place
    return f" at {place_of_smallest:.200}" if place_of_smallest else ""
