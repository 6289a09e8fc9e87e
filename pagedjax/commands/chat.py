"""`pagedjax chat`: a conversation in the terminal, in this process.

    line -> turn(conversation, line) -> Reply      pure: what the line changes, what to tell, what to do next
    answer(requests, ids, ...) -> Said             the engine's steps until the answer has ended, or was stopped
    chat(llm, ...)                                 the loop around them: reads lines, shows pieces, keeps the answers

Every turn sends the whole conversation; the prefix cache finds what the turns before it computed. Only what the model
says goes to standard output; everything else goes to standard error, so that a pipe gets the answers alone.
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
    from pagedjax.llm import LLM
    from pagedjax.params import SamplingParams
    from pagedjax.session import Session

COMMANDS = {
    "/help": "this list",
    "/stats": "speed of the last answer, and how much of its prompt was in the cache",
    "/undo": "drop the last turn: what you said and the answer",
    "/reset": "drop all turns; the system text stays",
    "/system": "TEXT sets the system text, `off` removes it, nothing shows it",
    "/save": "FILE writes the conversation as a JSON list of messages",
    "/quit": "leave, as Ctrl-D does",
}
HELP = "\n".join(
    [
        *(f"{name:<8} {text}" for name, text in COMMANDS.items()),
        "//...    say a line that begins with /",
        "Ctrl-C   stop the answer under way; what was said stays",
    ]
)
Message = dict[str, str]


class Stats(NamedTuple):
    """What the last answer cost. Seconds count from when the line was read.

    `seconds` ends with the answer; `first_token` is None if there was none. `compilations` were XLA's, within them.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token: float | None
    seconds: float
    compilations: int

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first one, in the time after it; None when there is nothing after it."""
        if self.first_token is None or self.tokens < 2 or self.seconds <= self.first_token:
            return None
        return (self.tokens - 1) / (self.seconds - self.first_token)

    def text(self) -> str:
        first = "none" if self.first_token is None else f"after {self.first_token:.3f} s"
        rate = "" if self.tokens_per_s is None else f", then {self.tokens_per_s:.1f} tokens/s"
        made = f"; {self.compilations} programs were compiled meanwhile" if self.compilations else ""
        return (
            f"{self.tokens} tokens in {self.seconds:.3f} s: the first {first}{rate}{made}\n"
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
        """What has been said, and a new line of the user's, as a chat template takes it."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.turns:
            said += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return said if line is None else [*said, {"role": "user", "content": line}]


class Reply(NamedTuple):
    """What a line leads to: the conversation after it, what to tell the user, and what is left to do with `what`."""

    conversation: Conversation
    note: str = ""
    do: Literal["nothing", "answer", "save", "quit"] = "nothing"
    what: str = ""


def turn(conversation: Conversation, line: str) -> Reply:
    """Read a line of the user's. Nothing is computed, read or written here.

    An answer joins the conversation when it has been given, so "answer" leaves the conversation as it is.
    """
    c, line = conversation, line.strip()
    if not line:
        return Reply(c)
    if not line.startswith("/") or line.startswith("//"):
        return Reply(c, do="answer", what=line.removeprefix("/") if line.startswith("//") else line)
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; /help lists the commands"
        return Reply(c, f"there is no command {name}{hint} (begin with // to say a line that begins with /)")
    if rest and name not in ("/system", "/save"):
        return Reply(c, f"{name} takes nothing after it, but there is {rest!r:.60}")
    if name == "/system":
        return _system(c, rest)
    if name == "/reset":
        return Reply(Conversation(c.system), f"{len(c.turns)} turns dropped")
    if name == "/undo" and c.turns:
        return Reply(replace(c, turns=c.turns[:-1]), f"dropped: {c.turns[-1].user!r:.60}")
    if name == "/undo":
        return Reply(c, "there is no turn to drop")
    if name == "/stats":
        return Reply(c, "there is no answer yet" if c.stats is None else c.stats.text())
    if name == "/save":
        return Reply(c, do="save", what=rest) if rest else Reply(c, "/save needs a file: /save conversation.json")
    return Reply(c, do="quit") if name == "/quit" else Reply(c, HELP)


def _system(c: Conversation, text: str) -> Reply:
    if not text:
        return Reply(c, "no system text of yours" if c.system is None else f"system text: {c.system}")
    if text == "off":
        return Reply(replace(c, system=None), "the system text is removed")
    return Reply(replace(c, system=text), "the system text is set; it counts from the next line on")


# answering -----------------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """An answer. `ended` is why: a stop token ("stop"), a limit ("length"), or the user ("abort")."""

    text: str
    ended: str
    stats: Stats


def answer(
    requests: Session,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    show: Callable[[str], object],
    stopped: Callable[[], bool] = lambda: False,
) -> Said:
    """Answer a prompt of token ids. Its blocks are free when this returns or raises.

    Args:
        show: called with each piece of text when it is final.
        stopped: asked between steps whether to stop; a step is never left half done.

    Raises:
        ValueError: a request that can never run, see `Engine.add`.
    """
    from pagedjax.session import GenerationRequest
    from pagedjax.text.outputs import OutputBuilder

    began = time.perf_counter()
    (mine,) = requests.add([GenerationRequest(ids, params)])
    (branch,) = mine.values()
    assert isinstance(branch, OutputBuilder)
    first, compilations, shown = None, 0, 0
    try:
        while branch.finish_reason is None and not stopped():
            compilations += requests.step().result.compilations
            if first is None and branch.token_ids:
                first = time.perf_counter() - began
            if len(branch.text) > shown:
                shown, piece = len(branch.text), branch.text[shown:]
                show(piece)
    finally:
        requests.abandon(mine)
    spent = time.perf_counter() - began
    stats = Stats(len(ids), branch.num_cached or 0, len(branch.token_ids), first, spent, compilations)
    return Said(branch.text, branch.finish_reason or "abort", stats)


def too_long(tokens: int, max_model_len: int, turns: int) -> str | None:
    """Why a conversation of so many tokens, the new line included, has no room for an answer; None if it has."""
    if tokens < max_model_len:
        return None
    what = f"the conversation has {tokens} tokens with this line, but max_model_len is {max_model_len}"
    ways = "say it shorter, or start with a larger --max-model-len if the model allows it"
    return f"{what} and an answer needs one; {'/undo drops the last turn, /reset all; or ' if turns else ''}{ways}"


# the loop ------------------------------------------------------------------------------------------------------------


def chat(
    llm: LLM,
    params: SamplingParams,
    *,
    system: str | None = None,
    lines: Iterator[str] | None = None,
    show: Callable[[str], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Conversation:
    """Talk until the lines end or one says /quit -> the conversation.

    Args:
        lines: what the user says, None for standard input.
        show: takes the answer's pieces, None for standard output. note: takes all else, None for standard error.

    Raises:
        ValueError: the model has no chat template, or refuses the system text.
    """
    from pagedjax.session import Session

    show, note = show or _print, note or _note
    conversation = Conversation(system)
    if llm.tokenizer.chat_template is None:
        raise ValueError("this model has no chat template, so it cannot chat; `pagedjax generate` continues a text")
    llm.tokenizer.apply_chat_template(conversation.messages("Hi"))  # says now what it would say at the first line
    requests = Session(llm.engine, llm.tokenizer, llm.model.eos_token_ids)
    for line in _read() if lines is None else lines:
        reply = turn(conversation, line)
        conversation = reply.conversation
        if reply.note:
            note(reply.note)
        if reply.do == "quit":
            break
        if reply.do == "save":
            note(save(conversation, reply.what))
        if reply.do == "answer":
            conversation = _answered(llm, requests, params, conversation, reply.what, show, note)
    return conversation


def _answered(
    llm: LLM, requests: Session, params: SamplingParams, c: Conversation, line: str, show, note
) -> Conversation:
    """The conversation with the line and its answer; as it was when there is none, and then the user is told why."""
    limit = llm.engine.config.max_model_len
    try:
        ids = llm.tokenizer.apply_chat_template(c.messages(line))
        if (reason := too_long(len(ids), limit, len(c.turns))) is not None:
            raise ValueError(reason)
        with _interruptible() as stopped:
            said = answer(requests, ids, params, show=show, stopped=stopped)
    except ValueError as error:
        note(f"{error}. The line was not taken into the conversation")
        return c
    show("\n")
    if said.ended == "abort":
        note("[stopped]" if said.text else "[stopped before it said anything; the line was dropped]")
        if not said.text:
            return replace(c, stats=said.stats)
    elif said.ended == "length":
        full = len(ids) + said.stats.tokens >= limit
        what = f"max_model_len ({limit}): /undo or /reset makes room" if full else f"--max-tokens {params.max_tokens}"
        note(f"[the answer ends at {what}]")
    return replace(c, turns=(*c.turns, Exchange(line, said.text)), stats=said.stats)


def save(conversation: Conversation, file: str) -> str:
    """Write the messages as JSON, replacing what the file held -> what to tell."""
    messages = conversation.messages()
    try:
        Path(file).expanduser().write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
    except OSError as error:
        return f"not saved: {error}"
    return f"{len(messages)} messages saved to {file}"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed within; pressed again, it interrupts as usual, for a step that takes too long.

    A flag and no exception, since one in the middle of a step would have all that it knows computed again.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield lambda: False
        return
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def press(*_) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _read() -> Iterator[str]:
    """Lines of standard input: with a prompt, editing and a history at a terminal, and plainly from a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from sys.stdin
        return
    with suppress(ImportError):  # a Python without it reads lines all the same
        import readline  # noqa: F401  (input() uses it once it is loaded)
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
