"""From `StructuredOutputsParams` to a `Grammar`.

llguidance is imported when the first grammar is compiled.
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
from pagedjax.text.structured.regular import first_byte_beyond
from pagedjax.text.surrogates import check_whole
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer

MAX_KEPT = 64  # compiled grammars; the one that was not used for the longest time is dropped
# Most characters of a form, so that compiling takes less than a second; fewer of a grammar, which
# may have to be translated in Python first
MAX_TEXT = {"json": 2**17, "choice": 2**17, "grammar": 2**16, "regex": 2**14}
# Between JSON's tokens: without a limit a model could write white space for ever
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,16}"
JSON_SPACE = r"[\x20\x0A\x0D\x09]*"
MAX_SEARCHED = 500  # schemas: in a form that has more, the place of an error is not looked for
# Limits of llguidance's parser. An answer that exceeds one is cancelled, and never ends as if it
# were complete.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 50_000, "max_grammar_size": 200_000}
MISSING_LIBRARY = (
    "structured outputs need llguidance; install the extra: pip install 'pagedjax[structured]'"
)


class Grammars:
    """Compiles and keeps grammars for one tokenizer and one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def compiled(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form.

        Raises:
            ValueError: llguidance is missing, the model has no tokenizer or no EOS token, or the
                form cannot be compiled.
        """
        with self._lock:
            grammar = self._cache.get(form)
            if grammar is not None:
                self._cache.move_to_end(form)
                return grammar
        text, ignored = grammar_text(form, vocabulary.marks(self.tokenizer))
        grammar = self._compile(text, form, ignored)
        with self._lock:
            self._cache[form] = grammar
            while len(self._cache) > MAX_KEPT:
                self._cache.popitem(last=False)
        return grammar

    def _compile(
        self, text: str, form: StructuredOutputsParams, ignored: tuple[str, ...]
    ) -> Grammar:
        """Compile llguidance's text of a form.

        Raises:
            ValueError: the text cannot be used, or it allows no answer.
        """
        library = _library()
        library_vocabulary = self._library_vocabulary()
        limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
        start = library.LLMatcher(library_vocabulary, text, log_level=0, limits=limits)
        kind = _kind(form)
        if not start.is_error():
            first_mask = start.compute_bitmask()
            if not start.is_error() and not any(first_mask):
                raise ValueError(f"structured_outputs.{kind} allows no answer at all")
        if start.is_error():
            message = first_line(start.get_error())
            place = _place(form, message, library_vocabulary) if kind == "json" else ""
            raise ValueError(f"structured_outputs.{kind} cannot be used{place}: {message}")
        return Grammar(start, -(-self.vocab_size // 32), ignored, self.eos_token_ids)

    def _library_vocabulary(self) -> Any:
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
        raise ValueError(MISSING_LIBRARY) from error


def _kind(form: StructuredOutputsParams) -> str:
    """The option that says what the form is, such as "json"."""
    names = ("json", "regex", "choice", "grammar", "json_object")
    return next(name for name in names if getattr(form, name) not in (None, False))


def grammar_text(
    form: StructuredOutputsParams, marks: Mapping[str, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """llguidance's text of a form's grammar, and the keywords that are ignored.

    Args:
        marks: ids of the added tokens that a Lark grammar may name, by their names.

    Raises:
        ValueError: too long, no JSON, a keyword that is not supported, or a grammar that cannot be
            read.
    """
    library = _library()
    name = _kind(form)
    value = getattr(form, name)
    length = 0
    if isinstance(value, str):
        length = len(value)
    elif isinstance(value, tuple):  # the choices
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
            grammar = vocabulary.grammar_with_ids(value, marks or {})
            return library.grammar_from("grammar", grammar), ()
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs.grammar cannot be read: {first_line(str(error))}"
            ) from error
    schema: Any = {"type": "object"}
    ignored: tuple[str, ...] = ()
    if name == "json":
        schema, ignored = schema_of(form)
    text = library.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=_schema_options(form)
    )
    return text, ignored


def _schema_options(form: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for a JSON schema. Raises ValueError for a wrong whitespace_pattern."""
    if form.whitespace_pattern is not None:
        _check_white_space(form.whitespace_pattern)
    options: dict[str, Any] = {"lenient": False}
    if form.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = form.whitespace_pattern or WHITE_SPACE
    return options


def _check_white_space(pattern: str) -> None:
    """Raises ValueError for a pattern of more than JSON's white space: answers would be no JSON."""
    problem = f"structured_outputs.whitespace_pattern is {pattern!r:.80}"
    try:
        start = first_byte_beyond(pattern, JSON_SPACE)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    if start is not None:
        example = f"texts that begin with {start!r}"
        raise ValueError(
            f"{problem}, which allows {example} and are no white space of JSON; use [ \\t\\n\\r] alone"
        )


def schema_of(form: StructuredOutputsParams) -> tuple[Any, tuple[str, ...]]:
    """The schema that is compiled, and the places of the keywords that are ignored."""
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
    option = "ignore_unsupported (strict: false in response_format)"  # as an error names it
    schema, ignored = keywords.checked(
        schema, "structured_outputs.json", option=option, ignore=form.ignore_unsupported
    )
    if form.disable_additional_properties:
        schema = keywords.closed(schema)
    return schema, ignored


def _place(form: StructuredOutputsParams, message: str, library_vocabulary: Any) -> str:
    """Where in a JSON schema an error is: " at " and a place, for a message; "" if not known.

    It is the longest place whose schema gives the same error by itself.
    """
    library = _library()
    schemas = list(islice(keywords.subschemas(schema_of(form)[0]), MAX_SEARCHED + 1))
    if len(schemas) > MAX_SEARCHED:
        return ""
    longest = ""
    limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
    for place, schema in schemas:
        text = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        error = library.LLMatcher.validate_grammar(text, library_vocabulary, limits=limits)
        if error and first_line(error) == message and len(place) >= len(longest):
            longest = place
    return f" at {longest:.200}" if longest else ""
