"""JSON schemas that cover every supported keyword, each with instances that must pass and that must
fail.

`CASES` is made by the functions below, so that numbers, kinds and nestings vary. A case's instances
are checked twice: by `jsonschema`, and by the grammar that the schema is compiled to. Properties of
instances are in the schema's order, because answers are (docs/design/structured-outputs.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# A small object that a random model completes in a few tokens.
SMALL = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["n", "kind"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    name: str
    schema: Any
    good: tuple[Any, ...]
    bad: tuple[Any, ...]


VALUES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "boolean": (True, False),
    "integer": (0, -3, 12345),
    "number": (0, 12, -0.5, 3.25),
    "string": ("", "a", 'quote " and \\', "ünï 漢字 🙂", "line\nbreak"),
    "array": ([], [1, "a", None], [[]]),
    "object": ({}, {"a": 1}, {"b": {"c": []}}),
}


def of_other_types(*names: str) -> tuple[Any, ...]:
    fits = {"number", "integer"} if "number" in names else set()
    return tuple(values[-1] for name, values in VALUES.items() if name not in {*names, *fits})


def typed(kind: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **keywords}


def integer(**keywords: Any) -> dict[str, Any]:
    return typed("integer", **keywords)


def array(items: Any, **keywords: Any) -> dict[str, Any]:
    return typed("array", items=items, **keywords)


def opened(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """An object that may have other properties too."""
    return typed("object", properties=properties, required=list(required))


def shut(required: Sequence[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object without other properties. If nothing is said, all of them are required."""
    return {**opened(properties if required is None else required, **properties), **SHUT}


SHUT = {"additionalProperties": False}


def types() -> Iterator[Case]:
    for name, values in VALUES.items():
        wrong = of_other_types(name)
        described = typed(name, title="T", description="d") | {"x-own": 1}
        yield Case(f"type {name}", typed(name), values, wrong)
        yield Case(f"const of type {name}", {"const": values[-1]}, values[-1:], wrong[:2])
        yield Case(f"described {name}", described, values, wrong[:1])
    for pair in (
        ("null", "string"),
        ("boolean", "integer"),
        ("array", "object"),
        ("string", "number"),
    ):
        good = (*VALUES[pair[0]], *VALUES[pair[1]])
        yield Case(f"types {pair}", typed(list(pair)), good, of_other_types(*pair))
    for name, schema in (("any", {}), ("true", "true")):  # the text of a schema
        yield Case(name, schema, (None, 1, "a", [1], {"a": 1}), ())


def enums() -> Iterator[Case]:
    for i in range(1, 9):
        texts = tuple(f"option {k}" for k in range(i))
        yield Case(f"enum of {i} texts", {"enum": list(texts)}, texts, ("option", "option 99", 1))
    mixed = (None, True, 3, "three", [1, 2], {"a": 1})
    wrong = (False, 4, "four", [1], {"a": 2}, {})
    yield Case("enum of kinds", {"enum": list(mixed)}, mixed, wrong)
    for value in ("a", 'with " quotes', "ünï", 7, -1.5, [1, "a"], {"k": [True]}):
        yield Case(f"const {value!r}", {"const": value}, (value,), ("b", 8, None))


def integers() -> Iterator[Case]:
    for low, high in ((0, 5), (-3, 3), (10, 10), (95, 1005), (-1000, -7), (0, 255)):
        good = (low, high, (low + high) // 2)
        bad = (low - 1, high + 1, low + 0.5 if low != high else high + 0.5)
        within = integer(minimum=low, maximum=high)
        yield Case(f"integer {low} to {high}", within, good, bad)
        strict = integer(exclusiveMinimum=low - 1, exclusiveMaximum=high + 1)
        yield Case(f"integer above {low - 1} and below {high + 1}", strict, good, bad)
    for bound in (0, 1, 9, 10, 99, 12345, -1, -10):
        high = (bound, bound + 100)
        low = (bound, bound - 100)
        yield Case(f"at least {bound}", integer(minimum=bound), high, (bound - 1,))
        yield Case(f"at most {bound}", integer(maximum=bound), low, (bound + 1,))
    for step in (2, 3, 5, 7, 10, 25, 100):
        good = (0, step, 17 * step, -3 * step)
        bad = (1, step + 1, 17 * step - 1)
        yield Case(f"multiple of {step}", integer(multipleOf=step), good, bad)
        bounded = integer(multipleOf=step, minimum=step, maximum=5 * step)
        bad = (0, 6 * step, step + 1)
        yield Case(f"multiple of {step} in a range", bounded, (step, 5 * step), bad)


def numbers() -> Iterator[Case]:
    for low, high in ((0, 1), (-1.5, 2.5), (0.25, 0.75), (-100, -99), (10, 1000)):
        middle = (low + high) / 2
        bad = (low - 0.25, high + 0.25, high + 1000)
        within = typed("number", minimum=low, maximum=high)
        yield Case(f"number {low} to {high}", within, (low, high, middle), bad)
        between = typed("number", exclusiveMinimum=low, exclusiveMaximum=high)
        yield Case(f"number between {low} and {high}", between, (middle,), (low, high, low - 1))
    for bound in (0, 0.5, -0.5, 3.25, 100):
        high = (bound, bound + 1)
        low = (bound, bound - 1)
        yield Case(f"number from {bound}", typed("number", minimum=bound), high, (bound - 0.125,))
        yield Case(f"number to {bound}", typed("number", maximum=bound), low, (bound + 0.125,))
    for step in (0.5, 0.25, 2):
        good = (0, step, 9 * step)
        schema = typed("number", multipleOf=step)
        yield Case(f"number, multiple of {step}", schema, good, (step / 2, 1.0625))


def strings() -> Iterator[Case]:
    for low, high in ((0, 0), (0, 3), (1, 1), (2, 5), (10, 20)):
        bad = ("x" * (high + 1), *(("x" * (low - 1),) if low else ()))
        schema = typed("string", minLength=low, maxLength=high)
        yield Case(f"text of {low} to {high}", schema, ("x" * low, "ü" * high), bad)
    for length in (1, 2, 4, 8):
        text = "a" * length
        yield Case(f"text from {length}", typed("string", minLength=length), (text,), (text[1:],))
        longer = (text + "a",)
        yield Case(f"text to {length}", typed("string", maxLength=length), ("", text), longer)
    patterns = (
        (r"^[a-z]+$", ("a", "abc"), ("", "A", "a1")),
        (r"^\d{3}-\d{4}$", ("555-1234",), ("5551234", "555-123")),
        (r"^(yes|no)$", ("yes", "no"), ("maybe", "yesno")),
        (r"[0-9]", ("a1b", "7"), ("", "abc")),
        (r"^a", ("a", "abc"), ("ba", "")),
        (r"z$", ("z", "xyz"), ("zx", "")),
        (
            r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$",
            ("555-1212", "(888)555-1212"),
            ("(888)555-1212 ext. 5",),
        ),
        (r"^[A-Z]{2}[0-9]{2,6}$", ("AB12", "XY123456"), ("A12", "AB1", "AB1234567")),
        (r"^.{2,3}$", ("ab", "äöü"), ("a", "abcd")),
        (r"^[^aeiou]*$", ("", "xyz"), ("a", "xaz")),
    )
    for pattern, good, bad in patterns:
        schema = typed("string", pattern=pattern)
        yield Case(f"pattern {pattern}", schema, good, (*bad, 1))
        lists = (list(bad), *([text] for text in bad))
        yield Case(f"list of pattern {pattern}", array(schema), ([], list(good)), lists)


def formats() -> Iterator[Case]:
    """Their checks differ between libraries, so these instances are plain ones."""
    for name, good, bad in (
        ("date", ("2024-02-29", "1999-12-31"), ("2024-13-01", "24-01-01", "today")),
        ("time", ("12:30:00Z", "23:59:59+01:00"), ("25:00:00Z", "noon")),
        ("date-time", ("2024-02-29T12:30:00Z",), ("2024-02-29", "12:30")),
        ("duration", ("P1D", "PT5M"), ("1 day", "P")),
        ("email", ("a@b.org",), ("a", "@b.org")),
        ("hostname", ("example.org", "a"), ("-a", "a..b")),
        ("ipv4", ("127.0.0.1", "255.255.255.255"), ("256.0.0.1", "1.2.3")),
        ("ipv6", ("::1", "2001:db8::8a2e:370:7334"), ("12345::", "g::1")),
        (
            "uuid",
            ("123e4567-e89b-12d3-a456-426614174000",),
            ("123e4567", "g23e4567-e89b-12d3-a456-426614174000"),
        ),
        ("uri", ("https://example.org/a?b=c#d", "urn:isbn:0451450523"), ("no uri", "//a")),
    ):
        text = typed("string", format=name)
        yield Case(f"format {name}", text, good, (*bad, 1))
        wrong = ({"at": bad[0]}, {}, {"at": 1})
        yield Case(f"property of format {name}", opened(["at"], at=text), ({"at": good[0]},), wrong)


def arrays() -> Iterator[Case]:
    for name in ("integer", "string", "boolean", "number", "null"):
        right = list(VALUES[name])
        wrong = ["a"] if name == "integer" else [of_other_types(name)[0]]
        bad = (wrong, [*right, *wrong], "no list")
        yield Case(f"items of {name}", array(typed(name)), ([], right, right[:1]), bad)
        for low, high in ((0, 2), (1, 1), (2, 4), (3, 3)):
            schema = array(typed(name), minItems=low, maxItems=high)
            good = (right[:1] * low, right[-1:] * high)
            short = (right[:1] * (low - 1),) if low else ()
            bad = (right[:1] * (high + 1), *short)
            yield Case(f"{low} to {high} items of {name}", schema, good, bad)
    for length in (1, 2, 3, 4):
        full = list(range(length))
        prefix = {"prefixItems": [{"const": i} for i in full], "minItems": length}
        short = full[:-1]
        bad = (short, [*full, 9], [9, *full[1:]])
        yield Case(f"tuple of {length}", array(False, **prefix), (full,), bad)
        schema = array(typed("string"), **prefix)
        good = (full, [*full, "a", "b"])
        yield Case(f"tuple of {length} and texts", schema, good, ([*full, 1], short))
    nested: Any = integer()
    value: Any = 1
    for depth in range(1, 7):
        nested = array(nested, maxItems=2)
        value = [value]
        bad = ([value], 1, value * 3)
        yield Case(f"lists {depth} deep", nested, (value, []), bad)


def objects() -> Iterator[Case]:
    kinds = ("integer", "string", "boolean", "array", "null")
    for count in range(1, 6):
        properties = {f"p{i}": typed(kinds[i]) for i in range(count)}
        full = {f"p{i}": VALUES[kinds[i]][0] for i in range(count)}
        names = list(full)
        last = names[-1]
        partial = {last: full[last]}
        first = {"p0": full["p0"]}
        extended = {**full, "other": 1}
        schema = typed("object", properties=properties)
        wrong = (extended, {**full, last: {}}, [])
        yield Case(f"{count} properties", {**schema, **SHUT}, ({}, full, partial), wrong)
        wrong = ({}, extended, *((partial,) if count > 1 else ()))
        yield Case(f"{count} required", shut(**properties), (full,), wrong)
        of_first = shut(["p0"], **properties)
        yield Case(f"first of {count} required", of_first, (full, first), ({}, extended))
        wrong = ({**full, "p0": {}},)
        yield Case(f"{count} properties and others", schema, ({}, full, extended), wrong)
        texts = {**opened(names, **properties), "additionalProperties": typed("string")}
        good = (full, {**full, "x": "y"})
        yield Case(f"{count} properties, others texts", texts, good, (extended, {"x": "y"}))
    mapping = typed("object", additionalProperties=integer())
    yield Case("mapping to integers", mapping, ({}, {"a": 1, "b": 2}), ({"a": "1"}, []))
    for minimum in (0, 1):
        bad = ({"a": "x"}, *(({},) if minimum else ()))
        schema = {**mapping, "minProperties": minimum}
        yield Case(f"at least {minimum} keys", schema, ({"a": 1}, {"a": 1, "b": 2}), bad)
    for maximum in (1, 2, 3):
        full = {f"k{i}": i for i in range(maximum)}
        schema = {**mapping, "maxProperties": maximum}
        yield Case(f"at most {maximum} keys", schema, ({}, full), ({**full, "more": 9},))
    by_pattern = typed("object", patternProperties={"^s_": typed("string"), "^i_": integer()})
    good = ({}, {"s_a": "x"}, {"i_b": 3})
    bad = ({"s_a": 1}, {"i_b": "x"}, {"other": 1})
    yield Case("properties by pattern", {**by_pattern, **SHUT}, good, bad)
    good = ({"other": 1}, {"s_a": "x"})
    yield Case("properties by pattern, others", by_pattern, good, ({"s_a": 1},))
    for name in ('a "b"', "ünï", "with space", "a/b~c", "0"):
        schema = opened([name], **{name: integer()})
        yield Case(f"property named {name}", schema, ({name: 1},), ({}, {name: "1"}))
    inner: Any = typed("string", maxLength=3)
    value: Any = "abc"
    for depth in range(1, 7):
        inner = shut(x=inner)
        value = {"x": value}
        yield Case(f"objects {depth} deep", inner, (value,), ({}, {"x": value}, {"y": 1}))


def combined() -> Iterator[Case]:
    parts = [integer(minimum=0), typed("string", maxLength=2)]
    for word in ("anyOf", "oneOf"):
        yield Case(f"{word} of types", {word: parts}, (3, "ab"), (-1, "abc", None))
        shapes = {
            word: [shut(kind={"const": kind}, size=integer()) for kind in ("circle", "square")]
        }
        good = ({"kind": "circle", "size": 1}, {"kind": "square", "size": 2})
        bad = ({"kind": "line", "size": 1}, {"kind": "circle"})
        yield Case(f"{word} of shapes", shapes, good, bad)
        bad = ([{"kind": "line"}], [1])
        yield Case(f"list of {word}", array(shapes), ([], list(good)), bad)
        for count in range(2, 6):
            texts = tuple(f"option {i}" for i in range(count))
            schema = {word: [{"const": text} for text in texts]}
            yield Case(f"{word} of {count} constants", schema, texts, ("option", "option 9", 0))
    bounds = {"allOf": [integer(minimum=3), {"maximum": 7}]}
    yield Case("allOf of bounds", bounds, (3, 7), (2, 8, "a"))
    merged = {"allOf": [opened("a", a=integer()), opened("b", b=typed("string"))]}
    yield Case("allOf of objects", merged, ({"a": 1, "b": "x"},), ({"a": 1}, {"a": 1, "b": 2}))
    outside = integer(anyOf=[{"minimum": 10}, {"maximum": -10}])
    yield Case("beside anyOf", outside, (10, -10), (0, "a"))
    for low in range(1, 6):
        schema = {"minimum": low, "anyOf": [integer(), typed("null")]}
        yield Case(f"null or at least {low}", schema, (None, low), (low - 1, "a"))


def references() -> Iterator[Case]:
    for word in ("$defs", "definitions"):
        schema = array({"$ref": f"#/{word}/item"}, **{word: {"item": integer(minimum=0)}})
        yield Case(f"reference to {word}", schema, ([], [0, 1]), ([-1], ["a"], 1))
        node = {"$ref": f"#/{word}/node"}
        children = array(node, maxItems=2)
        tree = {word: {"node": shut(value=integer(), children=children)}, **node}
        leaf = {"value": 1, "children": []}
        good = (leaf, {"value": 0, "children": [leaf, leaf]})
        yield Case(f"tree in {word}", tree, good, ({"value": 1}, {**leaf, "x": 1}))
    itself = shut(next={"anyOf": [{"$ref": "#"}, typed("null")]})
    good = ({"next": None}, {"next": {"next": None}})
    yield Case("reference to itself", itself, good, ({}, {"next": 1}))
    for depth in range(1, 6):
        chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)}
        schema = {"$defs": {**chain, f"d{depth}": typed("boolean")}, "$ref": "#/$defs/d0"}
        yield Case(f"references {depth} deep", schema, (True, False), (None, 0))


def realistic() -> Iterator[Case]:
    for count in range(1, 31):
        schema = shut(
            id=integer(minimum=1),
            name=typed("string", minLength=1, maxLength=4 + count),
            tags=array({"enum": [f"t{i}" for i in range(count)]}, maxItems=3),
            at=typed(["string", "null"], maxLength=10),
            score=typed("number", minimum=0, maximum=count),
        )
        good = {"id": count, "name": "n" * count, "tags": ["t0"], "at": None, "score": count}
        changes = ({"tags": [f"t{count}"]}, {"score": count + 1}, {"id": 0}, {"name": ""})
        bad = tuple(good | change for change in changes)
        yield Case(f"record {count}", schema, (good, {**good, "tags": [], "at": "today"}), bad)


FAMILIES = (
    *(types, enums, integers, numbers, strings, formats),
    *(arrays, objects, combined, references, realistic),
)
CASES = [case for family in FAMILIES for case in family()]
