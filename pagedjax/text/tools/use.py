"""What one request does with tools: its prompt, its grammar, and how its answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedjax.options.params import SamplingParams, StructuredOutputsParams
from pagedjax.text.outputs import CompletionOutput, RequestOutput
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.structured.matcher import Grammar
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools import grammar, prompt, reader
from pagedjax.text.tools.definitions import Tool, choice_of, tools_of
from pagedjax.text.tools.formats import CallFormat, Dialect, dialect


@dataclass(frozen=True)
class ToolUse:
    """Tools, the choice among them, and the model's dialect.

    tools: the tools of the request; none with the choice "none".
    required: whether an answer must be a call.
    only: the name of the one tool that may be called; None: each may be.
    parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...]
    required: bool
    only: str | None
    parallel: bool
    dialect: Dialect

    @property
    def call_format(self) -> CallFormat | None:
        """The format of calls; None if there can be none."""
        return self.dialect.format if self.tools else None

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], generating: bool = True
    ) -> list[int]:
        """The tokens of a conversation with these tools.

        Args:
            generating: add what begins the model's answer.

        Raises:
            ValueError: a message is wrong, or the model has no chat template.
        """
        plain_messages = prompt.conversation(messages, self.tools, self.dialect)
        tool_objects = [tool.shown() for tool in self.tools] if self.dialect.native else None
        return tokenizer.apply_chat_template(plain_messages, generating, tool_objects)

    def with_grammar(self, params: Any, tokenizer: Tokenizer) -> tuple[Any, tuple[str, ...]]:
        """Returns (sampling parameters with the grammar of these tools, the keywords of schemas
        that the grammar ignores).

        Raises:
            ValueError: a beam search, or a schema or another form that does not go with tools.
        """
        if not self.tools:
            return params, ()
        if not isinstance(params, SamplingParams):
            raise ValueError(
                "tools do not go with a beam search, whose answers no grammar constrains; "
                "leave one of the two out"
            )
        allowed = [tool for tool in self.tools if self.only in (None, tool.name)]
        answer, ignored_of_answer = grammar.answer_schema(params.structured_outputs)
        text, ignored_of_tools = grammar.lark(
            allowed,
            self.dialect.format,
            tokenizer,
            required=self.required,
            parallel=self.parallel and self.only is None and not self.dialect.format.single,
            answer=answer,
        )
        structured = StructuredOutputsParams(grammar=text)
        # A call may begin with a special token, which the reader must see. The grammar allows no
        # other special tokens.
        params = replace(params, structured_outputs=structured, skip_special_tokens=False)
        return params, (*ignored_of_tools, *ignored_of_answer)

    def compiled_grammar(self, grammars: Grammars, params: SamplingParams) -> Grammar:
        """The compiled grammar of parameters from `with_grammar`.

        Raises:
            ValueError: the grammar cannot be compiled; the message names the tool whose schema is
                the reason.
        """
        structured = params.structured_outputs
        assert structured is not None
        try:
            return grammars.compiled(structured)
        except ValueError as error:
            for tool in self.tools:
                schema, _ = grammar.arguments_schema(tool)
                try:
                    grammars.compiled(StructuredOutputsParams(json=schema))
                except ValueError as error_of_tool:
                    message = str(error_of_tool).replace(
                        "structured_outputs.json", f"tools: the schema of {tool.name!r}"
                    )
                    raise ValueError(message) from error
            raise ValueError(f"tools cannot be used: {error}") from error

    def read(self, output: RequestOutput) -> RequestOutput:
        """An output with its calls. The text stays as the model wrote it."""
        call_format = self.call_format
        if call_format is None:
            return output
        outputs = tuple(_read(completion, call_format) for completion in output.outputs)
        return replace(output, outputs=outputs)


def _read(output: CompletionOutput, call_format: CallFormat) -> CompletionOutput:
    _, calls, _ = reader.read(output.text, call_format)
    return replace(output, tool_calls=calls)


def tool_use(
    tokenizer: Tokenizer,
    tools: Any = None,
    choice: Any = None,
    parallel: bool | None = None,
    parser: str | None = None,
) -> ToolUse:
    """The tools of a request, checked.

    Args:
        tools, choice, parallel: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.
        parser: one of `formats.PARSERS`; None finds the format in the model's chat template.

    Raises:
        ValueError: one of these is wrong; the message names it.
    """
    defined = tools_of(tools)
    kind, only = choice_of(choice, defined)
    offered_tools = () if kind == "none" else defined
    return ToolUse(
        tools=offered_tools,
        required=kind == "required",
        only=only,
        parallel=parallel is not False,  # OpenAI's default is true
        dialect=dialect(tokenizer.chat_template, parser),
    )
