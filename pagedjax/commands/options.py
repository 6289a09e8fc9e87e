"""How the command line reads options.

The parser, the forms of values, and an option for each field of EngineConfig.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pagedjax.text import yaml_words

Number = TypeVar("Number", int, float)
MESH = "tensor=4, or tensor=2,expert=2"
EXAMPLES = {  # of options that take NAME=VALUE,...
    "mesh": MESH,
    "speculative": 'method=ngram,num_tokens=4 or \'{"method": "ngram"}\'',
    "kv_policy": "streaming, or name=streaming,sinks=4,window=1020",
    "prefix_checkpoints": "last, or interval=256,prompts=true,junctions=true",
}
SHORT = {  # vLLM's short options
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, which says what to write instead.

    Options are not abbreviated: a later version may have a longer name, and `--api-key KEY` is not
    --api-key-file. The values of unknown options are not shown, because one may be secret.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None):  # pyright: ignore
        """Parse, but unknown words are an error: a command's parser is the last that sees them."""
        words = sys.argv[1:] if args is None else list(args)
        # Fails now: the parser would take the key for another word, and show it
        if "--api-key" in _names_in(words):
            self.error(
                "--api-key is no option, because other users see a command line; write the key "
                "into a file, and give --api-key-file FILE to serve or bench serve"
            )
        values, unread = super().parse_known_args(words, namespace)
        if unread:
            self.error(self._unknown_message(unread, words))
        return values, unread

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--\S+): is ", r"\1 is ", message)
        command = re.match(
            r"argument (?:command|what): invalid choice: '([^']*)' \(choose from (.*)\)", message
        )
        if command:
            names = re.findall(r"[\w-]+", command[2])
            similar = difflib.get_close_matches(command[1], names, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"write one of {', '.join(names)}"
            message = f"there is no command {command[1]!r}; {hint}"
        self.exit(2, f"pagedjax: {message} (see {self.prog} --help)\n")

    def _unknown_message(self, unread: Sequence[str], words: Sequence[str]) -> str:
        """The error for words that no option takes; `words` are all words of the command."""
        messages = []
        for flag in _names_in(unread):
            message = self._vllm_message(flag, _value_of(flag, words))
            if not message:
                message = f"unrecognized arguments: {flag}"
                similar = difflib.get_close_matches(flag, self._option_string_actions, n=1)
                if similar:
                    message += f"; did you mean {similar[0]}?"
            messages.append(message)
        return "; ".join(messages) or f"unrecognized arguments: {' '.join(unread)}"

    def _vllm_message(self, flag: str, value: Any) -> str:
        """What to write in place of an option of vLLM; "" if it is no such option."""
        if flag == "--model" and any(action.dest == "model" for action in self._actions):
            return f"--model is no option here; the model is a word of its own: {self.prog} MODEL"
        from pagedjax.options.vllm_names.engine_arguments import ARGUMENTS

        name = SHORT.get(flag) or flag.lstrip("-").replace("-", "_")
        if name not in ARGUMENTS and name.startswith("no_"):
            name = name.removeprefix("no_")
            value = False
        if name not in ARGUMENTS:
            return ""
        row = ARGUMENTS[name]
        without_links = re.sub(r" ?\(?\[[^]]*\]\([^)]*\)\)?", "", row.text)
        text = without_links.replace("`", "")
        if row.effect == "changes nothing":
            return f"{flag} is vLLM's, and changes nothing here ({text}); leave it out"
        if row.effect == "refused":
            return f"{flag} is vLLM's, and {text}"
        try:
            options = dict(row.becomes(name, value)) if row.becomes else {}
        except ValueError as reason:
            return f"{flag} is {value!r:.80}; {reason}"
        flags = {f"--{option.replace('_', '-')}" for option in options}
        if flags and flags <= self._option_string_actions.keys():
            words = " ".join(_words_of(option, value) for option, value in options.items())
            return f"{flag} is vLLM's name; write {words}"
        return (
            f"{flag} is vLLM's, and no option of {self.prog}; in Python, LLM(...) takes {name}: "
            f"{text}"
        )


def _names_in(words: Sequence[str]) -> list[str]:
    """The names of the options among words, without their values."""
    options = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in options if re.match(r"--?[A-Za-z]", word)]


def _value_of(flag: str, words: Sequence[str]) -> Any:
    """The value that was typed for an option; True if there is none."""
    for word, next_word in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name == flag and equals:
            return yaml_words.word(value)
        if name == flag:
            return True if next_word.startswith("-") else yaml_words.word(next_word)
    return True


def _words_of(name: str, value: Any) -> str:
    """An option and its value as they are typed."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, dict):
        value = ",".join(f"{key}={element}" for key, element in value.items())
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"--{flag} {value}"


def add_engine_options(command: argparse.ArgumentParser, **defaults: str) -> None:
    """Add an option for each field of EngineConfig.

    `defaults` are texts for the help of fields of which the command has another default.
    """
    from pagedjax.options.config import EngineConfig

    group = command.add_argument_group(
        "the engine (the fields of EngineConfig; its docstring explains them)"
    )
    hints = get_type_hints(EngineConfig)
    sentences = first_sentences(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        flag = f"--{field.name.replace('_', '-')}"
        hint = hints[field.name]
        kind = hint
        if NoneType in get_args(hint):
            kind = next(part for part in get_args(hint) if part is not NoneType)
        default = "" if field.default in (None, ()) else f"the default is {field.default}"
        parts = (sentences[field.name], defaults.get(field.name, default))
        text = "; ".join(filter(None, parts)).replace("%", "%%")
        if any(get_origin(part) is Mapping for part in get_args(hint)):
            group.add_argument(flag, type=own_name, metavar="NAME", help=text)
        elif kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif dataclasses.is_dataclass(kind):
            form = name_or_mapping if str in get_args(hint) else mapping
            read = form(EXAMPLES[field.name])
            metavar = "AXIS=N,..." if field.name == "mesh" else "NAME=VALUE,..."
            text = f"{text}; a JSON object is taken too"
            group.add_argument(flag, f"{flag}-config", type=read, metavar=metavar, help=text)
        elif get_origin(kind) is tuple and get_args(kind)[0] is str:
            group.add_argument(flag, type=names, metavar="FILE.py:NAME,...", help=text)
        elif get_origin(kind) is tuple:
            read = integers("8,64,512", "ascending integers")
            if field.name == "devices":
                read = integers("0,1")
            group.add_argument(flag, type=read, metavar="N,N,...", help=text)
        elif get_origin(kind) is Literal:
            group.add_argument(flag, choices=get_args(kind), help=text)
        else:
            read = decimal(kind) if kind in (int, float) else kind
            metavar = field.name.rsplit("_", 1)[-1].upper()
            group.add_argument(flag, type=read, metavar=metavar, help=text)


def first_sentences(cls: type) -> dict[str, str]:
    """The first sentence about each field in a dataclass's docstring, without its period."""
    sentences: dict[str, str] = {}
    for part in re.split(r"\n(?=[a-z_, ]+: )", inspect.cleandoc(cls.__doc__ or "")):
        fields, colon, text = part.partition(": ")
        if colon and re.fullmatch(r"[a-z_]+(, [a-z_]+)*", fields):
            sentence = re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]
            sentences |= dict.fromkeys(fields.split(", "), sentence)
    return sentences


def integers(example: str, noun: str = "integers") -> Callable[[str], tuple[int, ...]]:
    """The function that reads a list of integers. Its error shows the example."""

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(decimal(int)(part.strip()) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"is {text!r}; write {noun}, such as {example}"
            ) from None

    return read


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them; commas in parentheses are between parameters."""
    parts = [""]
    depth = 0  # how many parentheses are open
    quote = ""  # the quote that is open inside parentheses
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif depth and character in "'\"":
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(parts)


def at_least_1(text: str) -> int:
    """Read an integer of at least 1. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}; it must be an integer of at least 1")
    return int(text)


def mebibytes(text: str) -> float:
    """Read a size in MiB of a byte or more. Raises ArgumentTypeError."""
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
    """Read whole seconds, 0 or more. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"is {text}; it must be a whole number of seconds, at least 0"
        )
    return int(text)


def whole_number(text: str) -> int:
    """Read a whole number, 0 or more. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"is {text}; it must be a whole number, at least 0")
    return int(text)


def named_folder(text: str) -> tuple[str, str]:
    """Read NAME=FOLDER -> (name, folder). Raises ArgumentTypeError."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=FOLDER; write poems=adapters/poems")
    return name, folder


def mapping(example: str) -> Callable[[str], dict[str, Any]]:
    """The function that reads a JSON object, or NAME=VALUE,... Its error shows the example.

    A VALUE is a number, true, false or a word.
    """

    def read(text: str) -> dict[str, Any]:
        pairs = [part.partition("=") for part in text.split(",")]
        if not text.startswith("{") and all(name and value for name, _, value in pairs):
            return {name: _word(value) for name, _, value in pairs}
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(
                f"is {text!r}, which is neither NAME=VALUE,... nor a JSON object; write {example}"
            )
        return value

    return read


def name_or_mapping(example: str) -> Callable[[str], str | dict[str, Any]]:
    """The function that reads a name, or what `mapping` reads."""

    def read(text: str) -> str | dict[str, Any]:
        return mapping(example)(text) if "=" in text or text.startswith("{") else text

    return read


def own_name(text: str) -> str | dict[str, Any]:
    """Read the name of a shipped value or of a user's own: mine.py:NAME, or with parameters
    name=mine.py:NAME,worth=64, mine.py:NAME(worth=64) or a JSON object.
    """
    if not re.match(r"name=|\{", text):
        return text
    return mapping("name=mine.py:NAME,worth=64")(text)


def _word(text: str) -> Any:
    """The value of a word. NAME=VALUE has no word for None, so "null" stays a text."""
    value = yaml_words.word(text)
    return text if value is None else value


def decimal(kind: type[Number]) -> Callable[[str], Number]:
    """The function that reads a number of the command line: in decimal, without Python's 1_0."""
    kinds = (int,) if kind is int else (int, float)

    def read(text: str) -> Number:
        value = yaml_words.word(text)
        if type(value) not in kinds:
            raise ValueError(text)
        return kind(value)

    read.__name__ = kind.__name__  # argparse names it in its error
    return read
