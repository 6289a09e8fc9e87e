"""How models write calls, and which format a chat template has."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class CallFormat:
    """The text of calls: `begin`, one call, further ones with `between` before each, `end`.

    A call is `before`, its name, `after`, its arguments as a JSON object, and `close`.

    trigger: a text that no plain answer has. Empty: a call is the whole answer, and an answer that
        begins like a call is a call.
    id_length: the number of characters of a call's id, if the template asks for one.
    single: whether the template takes only one call in a message.
    """

    begin: str
    before: str
    after: str
    close: str
    between: str
    end: str
    trigger: str
    id_length: int | None = None
    single: bool = False

    def text_of(self, calls: list[tuple[str, str]]) -> str:
        """The text of calls, each a name and its arguments as JSON."""
        texts = [
            f"{self.before}{name}{self.after}{arguments}{self.close}" for name, arguments in calls
        ]
        return self.begin + self.between.join(texts) + self.end if calls else ""


HERMES = CallFormat(
    begin="<tool_call>\n",
    before='{"name": "',
    after='", "arguments": ',
    close="}\n</tool_call>",
    between="\n<tool_call>\n",
    end="",
    trigger="<tool_call>",
)
LLAMA = CallFormat(
    begin="",
    before='{"name": "',
    after='", "parameters": ',
    close="}",
    between="; ",
    end="",
    trigger="",
)
MISTRAL = CallFormat(
    begin="[TOOL_CALLS][",
    before='{"name": "',
    after='", "arguments": ',
    close="}",
    between=", ",
    end="]",
    trigger="[TOOL_CALLS]",
    id_length=9,
)
MISTRAL_SPACED = replace(MISTRAL, begin="[TOOL_CALLS] [")
MISTRAL_ARGS = replace(
    MISTRAL,
    begin="[TOOL_CALLS]",
    before="",
    after="[ARGS]",
    close="",
    between="[TOOL_CALLS]",
    end="",
)
PARSERS = ("hermes", "llama3_json", "mistral")  # vLLM's names of the formats


class Dialect(NamedTuple):
    """What a model knows of tools. `native`: its chat template shows tools, calls and results."""

    format: CallFormat
    native: bool


def dialect(template: str | None, parser: str | None = None) -> Dialect:
    """The dialect of a chat template. A template whose format is not known counts as one without
    tools: the default prompt asks for HERMES.

    Args:
        parser: one of PARSERS, in place of the format that the template has.

    Raises:
        ValueError: no such parser.
    """
    template = template or ""
    has_tools = re.search(r"\btools\b", template) is not None
    native_format = _format_of(template) if has_tools else None
    if parser is None:
        return Dialect(native_format or HERMES, native_format is not None)
    if parser not in PARSERS:
        raise ValueError(
            f"tool_call_parser is {parser!r:.80}; it must be one of {', '.join(PARSERS)}"
        )
    formats = {"hermes": HERMES, "llama3_json": _llama(template), "mistral": _mistral(template)}
    return Dialect(formats[parser], has_tools)


def _format_of(template: str) -> CallFormat | None:
    """The format of the calls in a chat template with tools; None if it is not known."""
    if "[TOOL_CALLS]" in template:
        return _mistral(template)
    if "<tool_call>" in template:
        # some templates write arguments as XML tags in this tag, and no format reads these
        writes_tags = "<function=" in template or "<arg_key>" in template
        return HERMES if "arguments" in template and not writes_tags else None
    if "tool_call" in template and re.search(r'\\?"parameters\\?": ', template):
        return _llama(template)
    return None


def _llama(template: str) -> CallFormat:
    return replace(LLAMA, single="only supports single tool-calls" in template)


def _mistral(template: str) -> CallFormat:
    if "[ARGS]" in template:
        return MISTRAL_ARGS
    return MISTRAL_SPACED if "[TOOL_CALLS] [" in template else MISTRAL
