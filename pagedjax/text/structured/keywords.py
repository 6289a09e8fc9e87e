"""Which keywords of JSON Schema (draft 2020-12) are supported, and where a schema has others.

A name that no draft of the standard has describes and constrains nothing (JSON Schema Core, section
4.3.1), so such a name is allowed. It is refused if it is nearly a keyword: then it is a mistake
that would change what is asked for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from pagedjax.text.structured.regular import first_byte_beyond


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords that constrain answers, as llguidance supports them.
SUPPORTED = _names(
    """
    type enum const anyOf oneOf allOf $ref properties required additionalProperties
    patternProperties minProperties maxProperties items prefixItems minItems maxItems
    additionalItems minLength maxLength pattern format minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf
    """
)
# Keywords that constrain nothing: names of places, and descriptions.
DESCRIBING = _names(
    """
    $schema $id id $anchor $defs definitions $comment $vocabulary title description default examples
    example deprecated readOnly writeOnly contentEncoding contentMediaType
    """
)
# Keywords of the standard that are not supported.
UNSUPPORTED = _names(
    """
    not if then else dependentRequired dependentSchemas dependencies propertyNames uniqueItems
    contains minContains maxContains unevaluatedItems unevaluatedProperties $dynamicRef
    $dynamicAnchor $recursiveRef $recursiveAnchor contentSchema
    """
)
KEYWORDS = sorted(SUPPORTED | DESCRIBING | UNSUPPORTED)
# Keywords whose values are mappings to schemas
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords whose values are, or may be, lists of schemas
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
# Keywords whose values are, or may be, schemas
SINGLE = ("items", "additionalProperties", "additionalItems")
# levels of schemas inside schemas; deeper schemas would also exhaust Python's stack elsewhere
MAX_DEPTH = 100
MAX_SCHEMAS = 20_000  # in one schema


def subschemas(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, schema) of a schema, and then of every schema inside it, if it is a mapping. A place
    is a JSON pointer, "#/...".

    Raises:
        ValueError: there are too many schemas, or they are too deep.
    """
    todo: list[tuple[str, Any, int]] = [("#", schema, 0)]
    count = 0
    while todo:
        place, mapping, depth = todo.pop()
        if not isinstance(mapping, Mapping):
            continue
        count += 1
        if count > MAX_SCHEMAS:
            raise ValueError(
                f"the JSON schema has more than {MAX_SCHEMAS} schemas in it; make it smaller"
            )
        if depth > MAX_DEPTH:
            raise ValueError(
                f"the JSON schema is more than {MAX_DEPTH} levels deep at {place[:80]}; "
                "make it flatter"
            )
        yield place, mapping
        inner: list[tuple[str, Any, int]] = []
        for name in OF_SCHEMAS:
            schemas = mapping.get(name)
            if isinstance(schemas, Mapping):
                inner += [
                    (f"{place}/{name}/{_escaped(key)}", value, depth + 1)
                    for key, value in schemas.items()
                ]
        for name in LISTS:
            schemas = mapping.get(name)
            if isinstance(schemas, list):
                inner += [
                    (f"{place}/{name}/{i}", value, depth + 1) for i, value in enumerate(schemas)
                ]
        inner += [(f"{place}/{name}", mapping.get(name), depth + 1) for name in SINGLE]
        todo += reversed(inner)


def _escaped(key: str) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def unsupported(schema: Any) -> Iterator[tuple[str, str]]:
    """(place, why not) of each keyword that is not supported."""
    for place, mapping in subschemas(schema):
        for name in mapping:
            key_place = f"{place}/{_escaped(name)}"
            if name in SUPPORTED or name in DESCRIBING:
                if name == "minProperties" and _counts_repeated_keys(mapping):
                    yield (
                        key_place,
                        "above 1 and above the number of required properties: "
                        "additional keys may repeat",
                    )
                if name == "patternProperties" and _names_all_keys(mapping):
                    yield (
                        key_place,
                        "not supported where its patterns match keys of properties alone: "
                        "the keys would repeat",
                    )
            elif name == "x-guidance":
                yield key_place, "not taken from a schema; use the fields of structured_outputs"
            elif name in UNSUPPORTED:
                yield key_place, "not supported"
            else:
                keyword = _nearly(name)
                if keyword:
                    yield key_place, f"no keyword; did you mean {keyword!r}?"


@lru_cache(4096)
def _nearly(name: str) -> str | None:
    """The keyword that a name is nearly; None if it is nearly no keyword, or nearly a keyword of
    DESCRIBING.
    """
    if len(name) > 40 or not name.isalnum():
        return None
    keywords = {word.lower(): word for word in KEYWORDS}
    near = difflib.get_close_matches(name.lower(), keywords, n=1, cutoff=0.85)
    keyword = keywords[near[0]] if near else None
    return None if keyword in DESCRIBING else keyword


def checked(schema: Any, subject: str, *, option: str, ignore: bool) -> tuple[Any, tuple[str, ...]]:
    """Returns the schema that is compiled, and the places of the keywords that are ignored.

    Args:
        subject: who has the schema, in the error.
        option: the setting that ignores keywords which are not supported, in the error.
        ignore: whether that setting is on.

    Raises:
        ValueError: the schema has a keyword that is not supported, and `ignore` is False.
    """
    refused = list(unsupported(schema))
    if refused and not ignore:
        place, why = refused[0]
        count = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        name = place.rpartition("/")[2]
        raise ValueError(
            f"{subject} has the keyword {name!r:.80} at {place:.200}, which is {why}{count}; "
            f"remove it, or set {option}"
        )
    places = tuple(place for place, _ in refused)
    return (without(schema, frozenset(places)) if refused else schema), places


def _counts_repeated_keys(schema: Mapping[str, Any]) -> bool:
    """Whether `minProperties` may count one key twice.

    The parser does not know which additional keys there were.
    """
    minimum = schema["minProperties"]
    required = schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    return isinstance(minimum, (int, float)) and minimum > max(1, num_required)


def _names_all_keys(schema: Mapping[str, Any]) -> bool:
    """Whether all keys that patterns allow are keys of `properties`, and there are no other keys.

    llguidance 1.9 allows such a key after `properties` again, and finds then that there is none:
    the answer cannot end. A test in tests/structured/test_grammars.py fails when this has changed.
    """
    keys = schema.get("properties")
    patterns = schema.get("patternProperties")
    if schema.get("additionalProperties") is not False:
        return False
    if (
        not isinstance(keys, Mapping)
        or not isinstance(patterns, Mapping)
        or not keys
        or not patterns
    ):
        return False
    parts = [part for pattern in patterns for part in _alternatives(pattern)]
    allowed = "|".join(f"({_whole_key_pattern(part)})" for part in parts)
    try:
        return first_byte_beyond(allowed, "|".join(map(re.escape, keys))) is None
    except ValueError:  # the compiler of grammars says what is wrong
        return False


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the bars that are in no group and in no class."""
    parts = [""]
    depth = 0
    # an escape, a class, or one character
    for piece in re.findall(r"\\.|\[\]?[^\]]*\]|[\s\S]", pattern):
        if piece == "(":
            depth += 1
        elif piece == ")":
            depth -= 1
        if piece == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _whole_key_pattern(pattern: str) -> str:
    """The expression of the whole keys in which `pattern` is found; `^` and `$` are their ends."""
    any_text = "(?s:.*)"
    before = "" if pattern.startswith("^") else any_text
    has_end = re.search(r"(?<!\\)(\\\\)*\$$", pattern)  # a `$` that is not escaped
    after = "" if has_end else any_text
    middle = pattern.removeprefix("^")
    if has_end:
        middle = middle.removesuffix("$")
    return before + middle + after


def without(schema: Any, places: frozenset[str]) -> Any:
    """A copy of a schema without the keywords at some places."""
    return _copied(schema, dropped=places)


def closed(schema: Any) -> Any:
    """A copy of a schema whose objects have the properties that it names, and no others."""
    places = [
        place
        for place, mapping in subschemas(schema)
        if "properties" in mapping and "additionalProperties" not in mapping
    ]
    return _copied(schema, closed=frozenset(places))


def _copied(
    value: Any,
    place: str = "#",
    *,
    dropped: frozenset[str] = frozenset(),
    closed: frozenset[str] = frozenset(),
) -> Any:
    """A copy of a schema, or of a part of it.

    Args:
        place: the place of the part.
        dropped: places that are left out.
        closed: places of objects that get no further properties.
    """
    if isinstance(value, list):
        items = enumerate(value)
        return [_copied(item, f"{place}/{i}", dropped=dropped, closed=closed) for i, item in items]
    if not isinstance(value, Mapping):
        return value
    inner = ((name, item, f"{place}/{_escaped(name)}") for name, item in value.items())
    copy = {
        name: _copied(item, at, dropped=dropped, closed=closed)
        for name, item, at in inner
        if at not in dropped
    }
    if place in closed:
        copy["additionalProperties"] = False
    return copy
