"""How the command line reads options: the parser, the forms of values, and an option for each field
of EngineConfig."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pagedjax.text import yaml_words

Number = TypeVar("Number", int, float)
MESH = "tensor=4, or tensor=2,expert=2"
EXAMPLES = {  # of options that take NAME=VALUE,...
    "mesh": MESH,
    "speculative": 'method=ngram,num_tokens=4 or \'{"method": "ngram"}\'',
    "kv_policy": "streaming, or name=streaming,sinks=4,window=1020",
}
SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
}  # of vLLM


class Parser(argparse.ArgumentParser):
    """Prints one line for an error, without the usage, and says what to write for an unknown
    option.

    Options are not abbreviated: a later version may have a longer name, and `--api-key KEY` is not
    --api-key-file. The values of unknown options are not shown, because one may be secret.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore
        """Of a command, all words must be known: its parser is the last one that sees them."""
        words = sys.argv[1:] if args is None else list(args)
        if "--api-key" in _names_in(words):  # before its value is taken for another word, and shown
            file = "write the key into a file, and give --api-key-file FILE to serve or bench serve"
            self.error(f"--api-key is no option, because other users see a command line; {file}")
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest, words))
        return found, rest

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\S+): is ", r"\1 is ", message)
        self.exit(2, f"pagedjax: {message} (see {self.prog} --help)\n")

    def _unknown(self, rest: Sequence[str], words: Sequence[str]) -> str:
        """What to say about words that no option takes."""
        said = []
        for flag in _names_in(rest):
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            what = f"unrecognized arguments: {flag}{f'; did you mean {near[0]}?' if near else ''}"
            said.append(self._instead(flag, _value_of(flag, words)) or what)
        return "; ".join(said) or f"unrecognized arguments: {' '.join(rest)}"

    def _instead(self, flag: str, value: Any) -> str:
        """What to write in place of an option of vLLM; "" for what is no such option."""
        if flag == "--model" and any(action.dest == "model" for action in self._actions):
            return f"--model is no option here; the model is a word of its own: {self.prog} MODEL"
        from pagedjax.vllm_names.engine_arguments import ARGUMENTS

        name = SHORT.get(flag) or flag.lstrip("-").replace("-", "_")
        if name not in ARGUMENTS and name.startswith("no_"):
            name, value = name.removeprefix("no_"), False
        if name not in ARGUMENTS:
            return ""
        row = ARGUMENTS[name]
        text = re.sub(r" ?\(?\[[^]]*\]\([^)]*\)\)?", "", row.text).replace("`", "")
        if row.effect != "taken":
            nothing = f"changes nothing here ({text}); leave it out"
            return f"{flag} is vLLM's, and {nothing if row.effect == 'changes nothing' else text}"
        try:
            options = dict(row.becomes(name, value)) if row.becomes else {}
        except ValueError as reason:
            return f"{flag} is {value!r:.80}; {reason}"
        if options and all(
            f"--{option.replace('_', '-')}" in self._option_string_actions for option in options
        ):
            return f"{flag} is vLLM's name; write {' '.join(_written(*option) for option in options.items())}"
        return f"{flag} is vLLM's, and no option of {self.prog}; in Python, LLM(...) takes {name}: {text}"


def _names_in(words: Sequence[str]) -> list[str]:
    """The names of the options among words, without their values."""
    ours = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in ours if re.match(r"--?[A-Za-z]", word)]


def _value_of(flag: str, words: Sequence[str]) -> Any:
    """What was typed for an option; True for nothing."""
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            return (
                yaml_words.word(value)
                if equals
                else True
                if after.startswith("-")
                else yaml_words.word(after)
            )
    return True


def _written(name: str, value: Any) -> str:
    """An option and its value as they are typed."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, dict):
        value = ",".join(f"{key}={one}" for key, one in value.items())
    return f"--{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def add_engine_options(command: argparse.ArgumentParser, **defaults: str) -> None:
    """An option for each field of EngineConfig. `defaults`: what its help says, where the command
    has another one."""
    from pagedjax.config import EngineConfig

    group = command.add_argument_group(
        "the engine (the fields of EngineConfig; its docstring explains them)"
    )
    hints, about = get_type_hints(EngineConfig), first_sentences(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        flag, hint = f"--{field.name.replace('_', '-')}", hints[field.name]
        (kind, *_) = (
            [part for part in get_args(hint) if part is not NoneType]
            if NoneType in get_args(hint)
            else [hint]
        )
        usual = "" if field.default in (None, ()) else f"the default is {field.default}"
        text = "; ".join(
            part for part in (about[field.name], defaults.get(field.name, usual)) if part
        )
        text = text.replace("%", "%%")
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif dataclasses.is_dataclass(kind):
            read = (name_or_mapping if str in get_args(hint) else mapping)(EXAMPLES[field.name])
            metavar = "AXIS=N,..." if field.name == "mesh" else "NAME=VALUE,..."
            text = f"{text}; a JSON object is taken too"
            group.add_argument(flag, f"{flag}-config", type=read, metavar=metavar, help=text)
        elif get_origin(kind) is tuple and get_args(kind)[0] is str:
            group.add_argument(flag, type=names, metavar="FILE.py:NAME,...", help=text)
        elif get_origin(kind) is tuple:
            read = (
                integers("0,1")
                if field.name == "devices"
                else integers("8,64,512", "ascending integers")
            )
            group.add_argument(flag, type=read, metavar="N,N,...", help=text)
        elif get_origin(kind) is Literal:
            group.add_argument(flag, choices=get_args(kind), help=text)
        else:
            read = decimal(kind) if kind in (int, float) else kind
            group.add_argument(
                flag, type=read, metavar=field.name.rsplit("_", 1)[-1].upper(), help=text
            )


def first_sentences(cls: type) -> dict[str, str]:
    """The first sentence of each field's documentation in a dataclass's docstring, without its
    period."""
    found: dict[str, str] = {}
    for part in re.split(r"\n(?=[a-z_, ]+: )", inspect.cleandoc(cls.__doc__ or "")):
        listed, colon, text = part.partition(": ")
        if colon and re.fullmatch(r"[a-z_]+(, [a-z_]+)*", listed):
            sentence = re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]
            found |= dict.fromkeys(listed.split(", "), sentence)
    return found


def integers(example: str, what: str = "integers") -> Callable[[str], tuple[int, ...]]:
    """How a list of integers is read. An error shows the example."""

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(decimal(int)(part.strip()) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"is {text!r}; write {what}, such as {example}"
            ) from None

    return read


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def at_least_1(text: str) -> int:
    """An integer of at least 1. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}; it must be an integer of at least 1")
    return int(text)


def mebibytes(text: str) -> float:
    """A size in MiB of a byte or more. Raises ArgumentTypeError."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 2**-20 <= size < math.inf:
        raise argparse.ArgumentTypeError(
            f"is {text}; it must be a number of MiB above 0, such as 8"
        )
    return size


def seconds(text: str) -> int:
    """Whole seconds, 0 or more. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"is {text}; it must be a whole number of seconds, at least 0"
        )
    return int(text)


def named_folder(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=FOLDER; write poems=adapters/poems")
    return name, folder


def mapping(example: str) -> Callable[[str], dict[str, Any]]:
    """How a JSON object, or NAME=VALUE,... with numbers, true, false or words, is read. An error
    shows the example."""

    def read(text: str) -> dict[str, Any]:
        pairs = [part.partition("=") for part in text.split(",")]
        if not text.startswith("{") and all(name and value for name, _, value in pairs):
            return {name: _word(value) for name, _, value in pairs}
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            what = f"is {text!r}, which is neither NAME=VALUE,... nor a JSON object"
            raise argparse.ArgumentTypeError(f"{what}; write {example}")
        return value

    return read


def name_or_mapping(example: str) -> Callable[[str], str | dict[str, Any]]:
    def read(text: str) -> str | dict[str, Any]:
        return mapping(example)(text) if "=" in text or text.startswith("{") else text

    return read


def _word(text: str) -> Any:
    """A word as a value; NAME=VALUE has no word for nothing."""
    value = yaml_words.word(text)
    return text if value is None else value


def decimal(kind: type[Number]) -> Callable[[str], Number]:
    """How a number of the command line is read: in decimal, and not as Python writes 1_0."""

    def read(text: str) -> Number:
        value = yaml_words.word(text)
        if type(value) not in ((int,) if kind is int else (int, float)):
            raise ValueError(text)
        return kind(value)

    read.__name__ = kind.__name__  # argparse names it in its error
    return read
