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

    tools: those of the request; none with the choice "none".
    required: a call is asked for.
    only: the name of the one tool that may be called.
    parallel: several calls may be asked for.
    """

    tools: tuple[Tool, ...]
    required: bool
    only: str | None
    parallel: bool
    dialect: Dialect

    @property
    def form(self) -> CallFormat | None:
        """The format of calls; None if there can be none."""
        return self.dialect.format if self.tools else None

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], generating: bool = True
    ) -> list[int]:
        """The tokens of a conversation with these tools.

        Raises:
            ValueError: a message is wrong, or the model has no chat template.
        """
        plain = prompt.conversation(messages, self.tools, self.dialect)
        tool_objects = [tool.shown() for tool in self.tools] if self.dialect.native else None
        return tokenizer.apply_chat_template(plain, generating, tool_objects)

    def applied(self, params: Any, tokenizer: Tokenizer) -> tuple[Any, tuple[str, ...]]:
        """The sampling parameters with the grammar of these tools, and the keywords of schemas that
        it ignores.

        Raises:
            ValueError: a beam search, or a schema or another form that does not go with tools.
        """
        if not self.tools:
            return params, ()
        if not isinstance(params, SamplingParams):
            raise ValueError(
                "tools do not go with a beam search, whose answers have no form; "
                "leave one of them out"
            )
        allowed = [tool for tool in self.tools if self.only in (None, tool.name)]
        answer, lost = grammar.answer_schema(params.structured_outputs)
        text, ignored = grammar.lark(
            allowed,
            self.dialect.format,
            tokenizer,
            required=self.required,
            parallel=self.parallel and self.only is None and not self.dialect.format.single,
            answer=answer,
        )
        # calls may be written with special tokens, and must be seen; others cannot occur in the
        # grammar
        form = StructuredOutputsParams(grammar=text)
        return replace(params, structured_outputs=form, skip_special_tokens=False), (
            *ignored,
            *lost,
        )

    def compiled(self, grammars: Grammars, params: SamplingParams) -> Grammar:
        """The compiled grammar of parameters from `applied`.

        Raises:
            ValueError: it cannot be compiled; names the tool whose schema is the reason.
        """
        form = params.structured_outputs
        assert form is not None
        try:
            return grammars.compiled(form)
        except ValueError as error:
            for tool in self.tools:
                try:
                    grammars.compiled(
                        StructuredOutputsParams(json=grammar.arguments_schema(tool)[0])
                    )
                except ValueError as wrong:
                    message = str(wrong).replace(
                        "structured_outputs.json", f"tools: the schema of {tool.name!r}"
                    )
                    raise ValueError(message) from error
            raise ValueError(f"tools cannot be used: {error}") from error

    def read(self, output: RequestOutput) -> RequestOutput:
        """An output with its calls. The text stays as the model wrote it."""
        form = self.form
        return (
            output
            if form is None
            else replace(
                output, outputs=tuple(_read(completion, form) for completion in output.outputs)
            )
        )


def _read(output: CompletionOutput, form: CallFormat) -> CompletionOutput:
    return replace(output, tool_calls=reader.read(output.text, form)[1])


def tool_use(
    tokenizer: Tokenizer,
    tools: Any = None,
    choice: Any = None,
    parallel: bool | None = None,
    parser: str | None = None,
) -> ToolUse:
    """The tools of a request, checked.

    Args:
        tools, choice, parallel: as OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.
        parser: one of `formats.PARSERS`; None finds the format in the model's chat template.

    Raises:
        ValueError: one of them is wrong; names it.
    """
    defined = tools_of(tools)
    kind, only = choice_of(choice, defined)
    used = () if kind == "none" else defined
    return ToolUse(
        used,
        kind == "required",
        only,
        parallel is not False,
        dialect(tokenizer.chat_template, parser),
    )
