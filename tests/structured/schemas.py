"""JSON schemas that cover every supported keyword, each with instances that must pass and that must
fail.

`CASES` is made by the functions below, so that numbers, kinds and nestings vary. A case's instances
are checked twice: by `jsonschema`, and by the grammar that the schema is compiled to. Properties of
instances are in the schema's order, because answers are (docs/design/structured-outputs.md).
"""

from __future__ import annotations

from collections.abc import Iterator
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


def types() -> Iterator[Case]:
    for name, values in VALUES.items():
        wrong = of_other_types(name)
        yield Case(f"type {name}", {"type": name}, values, wrong)
        yield Case(f"const of type {name}", {"const": values[-1]}, values[-1:], wrong[:2])
        yield Case(
            f"described {name}",
            {"type": name, "title": "T", "description": "d", "x-own": 1},
            values,
            wrong[:1],
        )
    for pair in (
        ("null", "string"),
        ("boolean", "integer"),
        ("array", "object"),
        ("string", "number"),
    ):
        good = (*VALUES[pair[0]], *VALUES[pair[1]])
        yield Case(f"types {pair}", {"type": list(pair)}, good, of_other_types(*pair))
    yield Case("any", {}, (None, 1, "a", [1], {"a": 1}), ())
    yield Case("true", "true", (None, 1, "a", [1], {"a": 1}), ())  # the text of a schema


def enums() -> Iterator[Case]:
    for i in range(1, 9):
        options = [f"option {k}" for k in range(i)]
        yield Case(
            f"enum of {i} texts", {"enum": options}, tuple(options), ("option", "option 99", 1)
        )
    mixed = [None, True, 3, "three", [1, 2], {"a": 1}]
    yield Case(
        "enum of kinds", {"enum": mixed}, tuple(mixed), (False, 4, "four", [1], {"a": 2}, {})
    )
    for value in ("a", 'with " quotes', "ünï", 7, -1.5, [1, "a"], {"k": [True]}):
        yield Case(f"const {value!r}", {"const": value}, (value,), ("b", 8, None))


def integers() -> Iterator[Case]:
    for low, high in ((0, 5), (-3, 3), (10, 10), (95, 1005), (-1000, -7), (0, 255)):
        good = (low, high, (low + high) // 2)
        bad = (low - 1, high + 1, low + 0.5 if low != high else high + 0.5)
        yield Case(
            f"integer {low} to {high}",
            {"type": "integer", "minimum": low, "maximum": high},
            good,
            bad,
        )
        strict = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        yield Case(f"integer above {low - 1} and below {high + 1}", strict, good, bad)
    for bound in (0, 1, 9, 10, 99, 12345, -1, -10):
        yield Case(
            f"at least {bound}",
            {"type": "integer", "minimum": bound},
            (bound, bound + 100),
            (bound - 1,),
        )
        yield Case(
            f"at most {bound}",
            {"type": "integer", "maximum": bound},
            (bound, bound - 100),
            (bound + 1,),
        )
    for step in (2, 3, 5, 7, 10, 25, 100):
        good = (0, step, 17 * step, -3 * step)
        bad = (1, step + 1, 17 * step - 1)
        yield Case(f"multiple of {step}", {"type": "integer", "multipleOf": step}, good, bad)
        bounded = {"type": "integer", "multipleOf": step, "minimum": step, "maximum": 5 * step}
        yield Case(
            f"multiple of {step} in a range", bounded, (step, 5 * step), (0, 6 * step, step + 1)
        )


def numbers() -> Iterator[Case]:
    for low, high in ((0, 1), (-1.5, 2.5), (0.25, 0.75), (-100, -99), (10, 1000)):
        middle = (low + high) / 2
        schema = {"type": "number", "minimum": low, "maximum": high}
        yield Case(
            f"number {low} to {high}",
            schema,
            (low, high, middle),
            (low - 0.25, high + 0.25, high + 1000),
        )
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        yield Case(f"number between {low} and {high}", schema, (middle,), (low, high, low - 1))
    for bound in (0, 0.5, -0.5, 3.25, 100):
        yield Case(
            f"number from {bound}",
            {"type": "number", "minimum": bound},
            (bound, bound + 1),
            (bound - 0.125,),
        )
        yield Case(
            f"number to {bound}",
            {"type": "number", "maximum": bound},
            (bound, bound - 1),
            (bound + 0.125,),
        )
    for step in (0.5, 0.25, 2):
        schema = {"type": "number", "multipleOf": step}
        yield Case(
            f"number, multiple of {step}", schema, (0, step, 8 * step + step), (step / 2, 1.0625)
        )


def strings() -> Iterator[Case]:
    for low, high in ((0, 0), (0, 3), (1, 1), (2, 5), (10, 20)):
        schema = {"type": "string", "minLength": low, "maxLength": high}
        good = ("x" * low, "ü" * high)
        bad = ("x" * (high + 1), *(("x" * (low - 1),) if low else ()))
        yield Case(f"text of {low} to {high}", schema, good, bad)
    for length in (1, 2, 4, 8):
        yield Case(
            f"text from {length}",
            {"type": "string", "minLength": length},
            ("a" * length,),
            ("a" * (length - 1),),
        )
        yield Case(
            f"text to {length}",
            {"type": "string", "maxLength": length},
            ("", "a" * length),
            ("a" * (length + 1),),
        )
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
        yield Case(f"pattern {pattern}", {"type": "string", "pattern": pattern}, good, (*bad, 1))
        schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
        yield Case(
            f"list of pattern {pattern}", schema, ([], list(good)), (list(bad), *([b] for b in bad))
        )


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
        yield Case(f"format {name}", {"type": "string", "format": name}, good, (*bad, 1))
        schema = {
            "type": "object",
            "properties": {"at": {"type": "string", "format": name}},
            "required": ["at"],
        }
        yield Case(
            f"property of format {name}",
            schema,
            ({"at": good[0]},),
            ({"at": bad[0]}, {}, {"at": 1}),
        )


def arrays() -> Iterator[Case]:
    for name in ("integer", "string", "boolean", "number", "null"):
        items = {"type": "array", "items": {"type": name}}
        right = list(VALUES[name])
        wrong = [of_other_types(name)[0]]
        if name == "integer":
            wrong = ["a"]
        yield Case(
            f"items of {name}", items, ([], right, right[:1]), (wrong, [*right, *wrong], "no list")
        )
        for low, high in ((0, 2), (1, 1), (2, 4), (3, 3)):
            schema = {**items, "minItems": low, "maxItems": high}
            good = ([right[0]] * low, [right[-1]] * high)
            bad = ([right[0]] * (high + 1),)
            short = ([right[0]] * (low - 1),) if low else ()
            yield Case(f"{low} to {high} items of {name}", schema, good, (*bad, *short))
    for length in (1, 2, 3, 4):
        schema = {
            "type": "array",
            "prefixItems": [{"const": i} for i in range(length)],
            "items": False,
        }
        full = list(range(length))
        yield Case(
            f"tuple of {length}",
            {**schema, "minItems": length},
            (full,),
            (full[:-1], [*full, 9], [9, *full[1:]]),
        )
        longer = {**schema, "items": {"type": "string"}, "minItems": length}
        yield Case(
            f"tuple of {length} and texts",
            longer,
            (full, [*full, "a", "b"]),
            ([*full, 1], full[:-1]),
        )
    nested: Any = {"type": "integer"}
    value: Any = 1
    for depth in range(1, 7):
        nested = {"type": "array", "items": nested, "maxItems": 2}
        value = [value]
        yield Case(
            f"lists {depth} deep", nested, (value, []), ([value], 1, [*value, *value, *value])
        )


def objects() -> Iterator[Case]:
    kinds = ("integer", "string", "boolean", "array", "null")
    for count in range(1, 6):
        names = [f"p{i}" for i in range(count)]
        properties = {name: {"type": kinds[i]} for i, name in enumerate(names)}
        full = {name: VALUES[kinds[i]][0] for i, name in enumerate(names)}
        partial = {names[-1]: full[names[-1]]}
        shut = {"type": "object", "properties": properties, "additionalProperties": False}
        extended = {**full, "other": 1}
        yield Case(
            f"{count} properties",
            shut,
            ({}, full, partial),
            (extended, {**full, names[-1]: {}}, []),
        )
        yield Case(
            f"{count} required",
            {**shut, "required": names},
            (full,),
            ({}, extended, *((partial,) if count > 1 else ())),
        )
        yield Case(
            f"first of {count} required",
            {**shut, "required": names[:1]},
            (full, {"p0": full["p0"]}),
            ({}, extended),
        )
        opened = {"type": "object", "properties": properties}
        yield Case(
            f"{count} properties and others",
            opened,
            ({}, full, extended),
            ({**full, names[0]: {}},),
        )
        texts = {**opened, "additionalProperties": {"type": "string"}, "required": names}
        yield Case(
            f"{count} properties, others texts",
            texts,
            (full, {**full, "x": "y"}),
            (extended, {"x": "y"}),
        )
    mapping = {"type": "object", "additionalProperties": {"type": "integer"}}
    yield Case("mapping to integers", mapping, ({}, {"a": 1, "b": 2}), ({"a": "1"}, []))
    for minimum in (0, 1):
        good = ({"a": 1}, {"a": 1, "b": 2})
        bad = ({"a": "x"}, *(({},) if minimum else ()))
        yield Case(f"at least {minimum} keys", {**mapping, "minProperties": minimum}, good, bad)
    for maximum in (1, 2, 3):
        full = {f"k{i}": i for i in range(maximum)}
        yield Case(
            f"at most {maximum} keys",
            {**mapping, "maxProperties": maximum},
            ({}, full),
            ({**full, "more": 9},),
        )
    by_pattern = {
        "type": "object",
        "patternProperties": {"^s_": {"type": "string"}, "^i_": {"type": "integer"}},
    }
    shut = {**by_pattern, "additionalProperties": False}
    yield Case(
        "properties by pattern",
        shut,
        ({}, {"s_a": "x"}, {"i_b": 3}),
        ({"s_a": 1}, {"i_b": "x"}, {"other": 1}),
    )
    yield Case(
        "properties by pattern, others", by_pattern, ({"other": 1}, {"s_a": "x"}), ({"s_a": 1},)
    )
    for name in ('a "b"', "ünï", "with space", "a/b~c", "0"):
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        yield Case(f"property named {name}", schema, ({name: 1},), ({}, {name: "1"}))
    inner: Any = {"type": "string", "maxLength": 3}
    value: Any = "abc"
    for depth in range(1, 7):
        inner = {
            "type": "object",
            "properties": {"x": inner},
            "required": ["x"],
            "additionalProperties": False,
        }
        value = {"x": value}
        yield Case(f"objects {depth} deep", inner, (value,), ({}, {"x": value}, {"y": 1}))


def combined() -> Iterator[Case]:
    number = {"type": "integer", "minimum": 0}
    text = {"type": "string", "maxLength": 2}
    for word in ("anyOf", "oneOf"):
        yield Case(f"{word} of types", {word: [number, text]}, (3, "ab"), (-1, "abc", None))
        shapes = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "size": {"type": "integer"}},
                "required": ["kind", "size"],
                "additionalProperties": False,
            }
            for kind in ("circle", "square")
        ]
        good = ({"kind": "circle", "size": 1}, {"kind": "square", "size": 2})
        yield Case(
            f"{word} of shapes",
            {word: shapes},
            good,
            ({"kind": "line", "size": 1}, {"kind": "circle"}),
        )
        yield Case(
            f"list of {word}",
            {"type": "array", "items": {word: shapes}},
            ([], list(good)),
            ([{"kind": "line"}], [1]),
        )
        for count in range(2, 6):
            texts = tuple(f"option {i}" for i in range(count))
            parts = [{"const": text} for text in texts]
            yield Case(
                f"{word} of {count} constants", {word: parts}, texts, ("option", "option 9", 0)
            )
    parts = [{"type": "integer", "minimum": 3}, {"maximum": 7}]
    yield Case("allOf of bounds", {"allOf": parts}, (3, 7), (2, 8, "a"))
    named = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    merged = {
        "allOf": [
            named,
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    }
    yield Case("allOf of objects", merged, ({"a": 1, "b": "x"},), ({"a": 1}, {"a": 1, "b": 2}))
    yield Case(
        "beside anyOf",
        {"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": -10}]},
        (10, -10),
        (0, "a"),
    )
    for low in range(1, 6):
        schema = {"minimum": low, "anyOf": [{"type": "integer"}, {"type": "null"}]}
        yield Case(f"null or at least {low}", schema, (None, low), (low - 1, "a"))


def references() -> Iterator[Case]:
    for word in ("$defs", "definitions"):
        schema = {
            word: {"item": {"type": "integer", "minimum": 0}},
            "type": "array",
            "items": {"$ref": f"#/{word}/item"},
        }
        yield Case(f"reference to {word}", schema, ([], [0, 1]), ([-1], ["a"], 1))
        tree = {
            word: {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {
                            "type": "array",
                            "items": {"$ref": f"#/{word}/node"},
                            "maxItems": 2,
                        },
                    },
                    "required": ["value", "children"],
                    "additionalProperties": False,
                }
            },
            "$ref": f"#/{word}/node",
        }
        leaf = {"value": 1, "children": []}
        yield Case(
            f"tree in {word}",
            tree,
            (leaf, {"value": 0, "children": [leaf, leaf]}),
            ({"value": 1}, {**leaf, "x": 1}),
        )
    itself = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    yield Case(
        "reference to itself", itself, ({"next": None}, {"next": {"next": None}}), ({}, {"next": 1})
    )
    for depth in range(1, 6):
        chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)}
        schema = {"$defs": {**chain, f"d{depth}": {"type": "boolean"}}, "$ref": "#/$defs/d0"}
        yield Case(f"references {depth} deep", schema, (True, False), (None, 0))


def realistic() -> Iterator[Case]:
    for count in range(1, 31):
        fields = {
            "id": {"type": "integer", "minimum": 1},
            "name": {"type": "string", "minLength": 1, "maxLength": 4 + count},
            "tags": {
                "type": "array",
                "items": {"enum": [f"t{i}" for i in range(count)]},
                "maxItems": 3,
            },
            "at": {"type": ["string", "null"], "maxLength": 10},
            "score": {"type": "number", "minimum": 0, "maximum": count},
        }
        schema = {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
        good = {"id": count, "name": "n" * count, "tags": ["t0"], "at": None, "score": count}
        bad = (
            {**good, "tags": [f"t{count}"]},
            {**good, "score": count + 1},
            {**good, "id": 0},
            {**good, "name": ""},
        )
        yield Case(f"record {count}", schema, (good, {**good, "tags": [], "at": "today"}), bad)


FAMILIES = (
    *(types, enums, integers, numbers, strings, formats),
    *(arrays, objects, combined, references, realistic),
)
CASES = [case for family in FAMILIES for case in family()]
