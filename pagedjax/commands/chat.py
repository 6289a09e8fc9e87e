"""The command `pagedjax chat`: a conversation in the terminal, in this process.

    turn(conversation, line) -> Reply    pure: the effect of a line, a note, and the next action
    answer(session, ids, ...) -> Answer  the engine's steps until the answer ends or is stopped
    chat(llm, ...)                       the loop: reads lines, shows text, keeps the answers

Each turn sends the whole conversation, and the prefix cache has the earlier turns. The model's text
goes to standard output and everything else to standard error, so that a pipe gets only the answers.
"""

from __future__ import annotations

import difflib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pagedjax.engine.session import Session
    from pagedjax.llm import LLM
    from pagedjax.options.params import SamplingParams

COMMANDS = {
    "/help": "this list",
    "/stats": "speed of the last answer, and the cached part of its prompt",
    "/undo": "drop the last turn: your line and the answer",
    "/reset": "drop all turns; the system text stays",
    "/system": "TEXT sets the system text, `off` removes it, no TEXT shows it",
    "/save": "FILE writes the conversation as a JSON list of messages",
    "/quit": "leave, as Ctrl-D does",
}
HELP = "\n".join(
    [
        *(f"{name:<8} {text}" for name, text in COMMANDS.items()),
        "//...    send a line that begins with /",
        "Ctrl-C   stop the answer; the text so far stays",
    ]
)
Message = dict[str, str]


class Stats(NamedTuple):
    """The cost of the last answer. Seconds count from the moment the line was read.

    `seconds` ends with the answer. `first_token` is None if there was none. `compilations` are
    XLA's during the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token: float | None
    seconds: float
    compilations: int

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the tokens after the first one; None if there are none."""
        if self.first_token is None or self.tokens < 2 or self.seconds <= self.first_token:
            return None
        return (self.tokens - 1) / (self.seconds - self.first_token)

    def text(self) -> str:
        """Two lines for the user."""
        first = "none" if self.first_token is None else f"after {self.first_token:.3f} s"
        text = f"{self.tokens} tokens in {self.seconds:.3f} s: the first {first}"
        if self.tokens_per_s is not None:
            text += f", then {self.tokens_per_s:.1f} tokens/s"
        if self.compilations:
            text += f"; {self.compilations} programs were compiled during it"
        return (
            f"{text}\n"
            f"prompt of {self.prompt_tokens} tokens, {self.cached_tokens} of them in the cache"
        )


class Exchange(NamedTuple):
    user: str
    assistant: str


@dataclass(frozen=True)
class Conversation:
    system: str | None = None
    turns: tuple[Exchange, ...] = ()
    stats: Stats | None = None  # of the last answer

    def messages(self, line: str | None = None) -> list[Message]:
        """All messages, with a new line of the user, for a chat template."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.turns:
            messages += [
                {"role": "user", "content": user},
                {"role": "assistant", "content": assistant},
            ]
        return messages if line is None else [*messages, {"role": "user", "content": line}]


class Reply(NamedTuple):
    """The effect of a line.

    The conversation after it, a note for the user, and the next action with its argument.
    """

    conversation: Conversation
    note: str = ""
    action: Literal["nothing", "answer", "save", "quit"] = "nothing"
    argument: str = ""


def turn(conversation: Conversation, line: str) -> Reply:
    """The effect of a line of the user. Pure.

    The action "answer" leaves the conversation unchanged, because the answer is added after it was
    generated.
    """
    c = conversation
    line = line.strip()
    if not line:
        return Reply(c)
    if line.startswith("//"):
        return Reply(c, action="answer", argument=line[1:])
    if not line.startswith("/"):
        return Reply(c, action="answer", argument=line)
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else "; /help lists the commands"
        return Reply(
            c, f"there is no command {name}{hint} (begin with // to send a line that begins with /)"
        )
    if argument and name not in ("/system", "/save"):
        return Reply(c, f"{name} takes no argument, but there is {argument!r:.60}")
    if name == "/system":
        return _system(c, argument)
    if name == "/reset":
        return Reply(Conversation(c.system), f"{len(c.turns)} turns dropped")
    if name == "/undo" and c.turns:
        return Reply(replace(c, turns=c.turns[:-1]), f"dropped: {c.turns[-1].user!r:.60}")
    if name == "/undo":
        return Reply(c, "there is no turn to drop")
    if name == "/stats":
        return Reply(c, "there is no answer yet" if c.stats is None else c.stats.text())
    if name == "/save":
        if not argument:
            return Reply(c, "/save needs a file: /save conversation.json")
        return Reply(c, action="save", argument=argument)
    return Reply(c, action="quit") if name == "/quit" else Reply(c, HELP)


def _system(c: Conversation, text: str) -> Reply:
    if not text and c.system is None:
        return Reply(c, "there is no system text")
    if not text:
        return Reply(c, f"system text: {c.system}")
    if text == "off":
        return Reply(replace(c, system=None), "the system text is removed")
    return Reply(
        replace(c, system=text), "the system text is set; it applies from the next line on"
    )


# answering ----------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """`reason` is why the answer ended: a stop token ("stop"), a limit ("length") or the user
    ("abort").
    """

    text: str
    reason: str
    stats: Stats


def answer(
    session: Session,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    show: Callable[[str], object],
    stopped: Callable[[], bool] = lambda: False,
) -> Answer:
    """Answer a prompt of token ids. Its blocks are free when this returns or raises.

    Args:
        show: called with each final piece of text.
        stopped: called between steps; True stops the answer.

    Raises:
        ValueError: a request that can never run, see `Engine.add`.
    """
    from pagedjax.engine.session import GenerationRequest
    from pagedjax.text.outputs import OutputBuilder

    start = time.perf_counter()
    (branches,) = session.add([GenerationRequest(ids, params)])
    (branch,) = branches.values()
    assert isinstance(branch, OutputBuilder)
    first_token = None
    compilations = 0
    length = 0  # of the text that was shown
    try:
        while branch.finish_reason is None and not stopped():
            compilations += session.step().result.compilations
            if first_token is None and branch.token_ids:
                first_token = time.perf_counter() - start
            if len(branch.text) > length:
                piece = branch.text[length:]
                length = len(branch.text)
                show(piece)
    finally:
        session.abandon(branches)
    stats = Stats(
        prompt_tokens=len(ids),
        cached_tokens=branch.num_cached or 0,
        tokens=len(branch.token_ids),
        first_token=first_token,
        seconds=time.perf_counter() - start,
        compilations=compilations,
    )
    return Answer(branch.text, branch.finish_reason or "abort", stats)


def too_long(tokens: int, max_model_len: int, turns: int) -> str | None:
    """The error if a conversation of so many tokens has no room for an answer; else None."""
    if tokens < max_model_len:
        return None
    shorten = "/undo drops the last turn, /reset all; or " if turns else ""
    return (
        f"the conversation has {tokens} tokens with this line, but max_model_len is {max_model_len}"
        f" and an answer needs one; {shorten}shorten the line, or start with a larger "
        "--max-model-len if the model allows it"
    )


# the loop -----------------------------------------------------------------------------------------


def chat(
    llm: LLM,
    params: SamplingParams,
    *,
    system: str | None = None,
    lines: Iterator[str] | None = None,
    show: Callable[[str], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Conversation:
    """Run the conversation until the lines end or /quit -> the conversation.

    Args:
        lines: the lines of the user; None is standard input.
        show: takes the text of answers; None is standard output.
        note: takes all other text; None is standard error.

    Raises:
        ValueError: the model has no chat template, or refuses the system text.
    """
    from pagedjax.engine.session import Session

    show = show or _print
    note = note or _note
    conversation = Conversation(system)
    if llm.tokenizer.chat_template is None:
        raise ValueError(
            "this model has no chat template, so it cannot chat; `pagedjax generate` continues a "
            "text"
        )
    # An error of the system text is raised now, and not at the first line
    llm.tokenizer.apply_chat_template(conversation.messages("Hi"))
    session = Session(llm.engine, llm.tokenizer, llm.model.eos_token_ids)
    for line in _read() if lines is None else lines:
        reply = turn(conversation, line)
        conversation = reply.conversation
        if reply.note:
            note(reply.note)
        if reply.action == "quit":
            break
        if reply.action == "save":
            note(save(conversation, reply.argument))
        if reply.action == "answer":
            line = reply.argument
            conversation = _answer_line(llm, session, params, conversation, line, show, note)
    return conversation


def _answer_line(
    llm: LLM, session: Session, params: SamplingParams, c: Conversation, line: str, show, note
) -> Conversation:
    """Answer a line -> the conversation with the line and its answer.

    Without an answer the conversation is unchanged, and a note says why.
    """
    limit = llm.engine.config.max_model_len
    try:
        ids = llm.tokenizer.apply_chat_template(c.messages(line))
        problem = too_long(len(ids), limit, len(c.turns))
        if problem is not None:
            raise ValueError(problem)
        with _interruptible() as stopped:
            text, reason, stats = answer(session, ids, params, show=show, stopped=stopped)
    except ValueError as error:
        note(f"{error}. The line is not part of the conversation")
        return c
    show("\n")
    if reason == "abort" and not text:
        note("[stopped before its first token; the line is dropped]")
        return replace(c, stats=stats)
    if reason == "abort":
        note("[stopped]")
    elif reason == "length" and len(ids) + stats.tokens >= limit:
        note(f"[the answer ends at max_model_len ({limit}): /undo or /reset makes room]")
    elif reason == "length":
        note(f"[the answer ends at --max-tokens {params.max_tokens}]")
    return replace(c, turns=(*c.turns, Exchange(line, text)), stats=stats)


def save(conversation: Conversation, file: str) -> str:
    """Write the messages as JSON; an existing file is replaced -> a note for the user."""
    messages = conversation.messages()
    try:
        Path(file).expanduser().write_text(
            json.dumps(messages, ensure_ascii=False, indent=1) + "\n", "utf-8"
        )
    except OSError as error:
        return f"not saved: {error}"
    return f"{len(messages)} messages saved to {file}"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Give the block a function that says whether Ctrl-C was pressed in it.

    The first Ctrl-C sets a flag, because an exception in a step rolls the step back and computes it
    again. The second one interrupts as usual.
    """
    # Only the main thread gets signals
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()
    previous_handler = signal.getsignal(signal.SIGINT)

    def press(*_) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _read() -> Iterator[str]:
    """Yield lines of standard input; at a terminal with a prompt, editing and a history."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401  (input() uses it when it is loaded)
    _note("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            _note("\nCtrl-D or /quit leaves")
        except EOFError:
            print()
            return


def _print(piece: str) -> None:
    print(piece, end="", flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
