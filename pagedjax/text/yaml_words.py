"""What a word means in a config, in `--set` and in NAME=VALUE: numbers are decimal, and only true
and false are truth values.

These are the words of YAML 1.2 (core schema). PyYAML's are those of YAML 1.1, where 010 is 8, 1:30
is 90, 1_0 is 10 and `on` is true. A word that is no number here is a text, and the check of its key
says what it must be.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_TAG = "tag:yaml.org,2002:"
_INTEGER = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_WORDS = (  # (kind, the pattern of its words, their first characters)
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", _INTEGER, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", r"<<", "<"),
)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if not re.fullmatch(_INTEGER, text):
        line = node.start_mark.line + 1
        raise ValueError(f"line {line}: {text!r} is no integer; write it in decimal, such as 16")
    bases = {"0o": 8, "0x": 16}
    return int(text, bases.get(text[:2], 10))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node)
    if not re.fullmatch(_FLOAT, text):
        line = node.start_mark.line + 1
        raise ValueError(f"line {line}: {text!r} is no number; write it as 0.5 or 1e-3")
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with these words."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # none of PyYAML's own


class Dumper(yaml.SafeDumper):
    """Texts that would be another value in YAML 1.1 or here are quoted."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """A text with one of three unusual ends of lines stands between double quotes, which escape
    them. PyYAML would read them as spaces.
    """
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


Dumper.add_representer(str, _text)
for _kind, _pattern, _first in _WORDS:
    _matches = re.compile(rf"^(?:{_pattern})\Z")
    Loader.add_implicit_resolver(_TAG + _kind, _matches, list(_first))
    Dumper.add_implicit_resolver(_TAG + _kind, _matches, list(_first))
Loader.add_constructor(f"{_TAG}int", _integer)
Loader.add_constructor(f"{_TAG}float", _float)


def load(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: bad syntax.
        ValueError: a value that is marked as a number and is none.
    """
    return yaml.load(text, Loader)


def dump(value: Any, **options: Any) -> str:
    """A YAML text that `load` reads as the same value. The options are those of `yaml.dump`."""
    return yaml.dump(value, Dumper=Dumper, **options)


def word(text: str) -> Any:
    """A single word as a number, a truth value, None or a text; white space and YAML's signs are
    text.
    """
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag == f"{_TAG}merge":
        return text
    return loader.construct_object(yaml.ScalarNode(tag, text))
