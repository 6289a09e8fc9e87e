"""The terminal chat: its commands without an engine, and conversations with the tiny model."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from pagedjax import SamplingParams
from pagedjax.commands import cli
from pagedjax.commands.chat import (
    COMMANDS,
    Conversation,
    Exchange,
    Stats,
    _read,
    answer,
    chat,
    too_long,
    turn,
)
from pagedjax.engine.session import Session
from pagedjax.host import scheduler
from tests import drawn
from tests.engine.runs import greedy
from tests.refusals import refused

GREEDY = greedy(8)
TALK = Conversation("be brief", (Exchange("one", "two"), Exchange("three", "four")))


@pytest.fixture
def llm(tiny_llm):
    """The shared engine. After the test it has no request, and the signal handler is restored."""
    handler = signal.getsignal(signal.SIGINT)
    yield tiny_llm
    assert signal.getsignal(signal.SIGINT) is handler
    scheduler.check(tiny_llm.engine.scheduler_state)
    assert not tiny_llm.engine.has_work
    assert tiny_llm.engine.scheduler_state.pool.num_free == tiny_llm.engine.config.num_blocks


def talk(llm, *lines: str, params=GREEDY, **options):
    """Run these lines. Returns the conversation, the printed text and the notes."""
    pieces = []
    notes = []
    end = chat(llm, params, lines=iter(lines), show=pieces.append, note=notes.append, **options)
    return end, "".join(pieces), notes


# commands, without an engine ----------------------------------------------------------------------


def test_a_text_line_asks_for_an_answer_and_changes_nothing():
    assert turn(TALK, "  hello there\n") == (TALK, "", "answer", "hello there")
    assert turn(TALK, "//etc/hosts is a file") == (TALK, "", "answer", "/etc/hosts is a file")
    assert turn(TALK, " \n") == (TALK, "", "nothing", "")


def test_messages_are_the_system_text_the_turns_and_the_new_line():
    assert TALK.messages("five") == [
        {"role": role, "content": content}
        for role, content in (
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", "two"),
            ("user", "three"),
            ("assistant", "four"),
            ("user", "five"),
        )
    ]
    assert Conversation().messages() == []


def test_turns_can_be_dropped_one_by_one_and_all_at_once():
    undone, note, action, _ = turn(TALK, "/undo")
    assert (undone.turns, action) == (TALK.turns[:1], "nothing")
    assert "three" in note
    assert turn(turn(undone, "/undo").conversation, "/undo").note == "there is no turn to drop"
    assert turn(TALK, "/reset").conversation == Conversation("be brief")


def test_the_system_text_is_set_shown_and_removed():
    assert turn(TALK, "/system be  long ").conversation == replace(TALK, system="be  long")
    assert turn(TALK, "/system") == (TALK, "system text: be brief", "nothing", "")
    assert turn(TALK, "/system off").conversation == replace(TALK, system=None)


def test_stats_are_those_of_the_last_answer():
    assert turn(TALK, "/stats").note == "there is no answer yet"
    stats = Stats(
        prompt_tokens=40, cached_tokens=32, tokens=5, first_token=0.5, seconds=1.5, compilations=2
    )
    assert stats.tokens_per_s == 4.0
    assert turn(replace(TALK, stats=stats), "/stats").note == stats.text()
    assert "2 programs were compiled" in stats.text()
    assert stats._replace(tokens=1).tokens_per_s is None
    assert "the first none" in stats._replace(tokens=0, first_token=None).text()


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("/quti", "did you mean /quit?"),
        ("/", "there is no command /"),
        ("/what now", "/help lists the commands"),
        ("/undo 2", "/undo takes no argument, but there is '2'"),
        ("/save", "/save needs a file"),
    ],
)
def test_an_invalid_command_gives_a_note_and_does_nothing(line, note):
    reply = turn(TALK, line)
    assert (reply.conversation, reply.action) == (TALK, "nothing")
    assert note in reply.note


def test_help_lists_every_command():
    assert all(name in turn(TALK, "/help").note for name in COMMANDS)


@drawn.given(
    30,
    1000,
    st.lists(
        st.one_of(
            st.text(), st.sampled_from(sorted(COMMANDS)), st.text().map(lambda t: f"/system {t}")
        )
    ),
)
def test_every_line_has_an_effect_or_a_note(lines):
    conversation = TALK
    for line in lines:
        reply = turn(conversation, line)
        assert reply.action in ("nothing", "answer", "save", "quit")
        assert bool(reply.argument) == (reply.action in ("answer", "save"))
        assert (
            reply.action == "answer"
            or reply.note
            or reply.action in ("save", "quit")
            or not line.strip()
        )
        assert reply.conversation.turns in (TALK.turns, TALK.turns[:1], ())
        conversation = reply.conversation


def test_a_conversation_that_is_too_long_names_the_limit_and_the_remedies():
    assert too_long(511, 512, 3) is None
    text = too_long(512, 512, 3)
    assert text is not None
    for part in ("512 tokens", "max_model_len is 512", "/undo", "/reset", "--max-model-len"):
        assert part in text
    assert "/undo" not in (too_long(512, 512, 0) or "")


# through an engine --------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_turn_matches_the_library_and_finds_earlier_turns_in_the_cache(llm):
    llm.reset_prefix_cache()
    lines = ["the cat", "the other cat", "hears the rain"]
    # no merge joins these letters, so their text has the generated tokens again, and the cache
    # finds them
    letters = tuple(token for letter in "qxz" for token in llm.tokenizer.encode(letter)[-1:])
    params = replace(GREEDY, allowed_token_ids=letters)
    messages = []
    expected = []
    cached = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        (output,) = llm.chat(messages, replace(params, enable_prefix_caching=False), use_tqdm=False)
        expected.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": expected[-1]})
    conversation = Conversation()
    for i, line in enumerate(lines):  # one chat for each, to see the cached tokens of each
        end, printed, notes = talk(llm, *lines[: i + 1], params=params)
        llm.reset_prefix_cache()
        assert notes == ["[the answer ends at --max-tokens 8]"] * (i + 1)
        assert printed == "".join(f"{text}\n" for text in expected[: i + 1])
        assert end.turns == (*conversation.turns, Exchange(line, expected[i]))
        conversation = end
        assert end.stats is not None
        cached.append(end.stats.cached_tokens)
        assert end.stats.tokens == 8
    assert conversation.messages() == messages
    before = [
        0,
        *(len(llm.tokenizer.apply_chat_template(messages[: 2 * i], False)) for i in (1, 2)),
    ]
    # without the answer's last token and the two marks after it
    computed = [max(0, tokens - 3) for tokens in before]
    assert cached == [tokens // 16 * 16 for tokens in computed]


def test_the_system_text_applies_from_the_next_line_on(llm):
    end, printed, notes = talk(llm, "/system she sells sea shells", "the cat", system="the rain")
    messages = [
        {"role": "system", "content": "she sells sea shells"},
        {"role": "user", "content": "the cat"},
    ]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert printed == output.outputs[0].text + "\n"
    assert end.system == "she sells sea shells"
    assert "is set" in notes[0]


def test_a_line_that_does_not_fit_is_refused_and_works_after_undo(llm):
    long = "the cat and the other cat are in the house " * 25
    end, printed, notes = talk(llm, long, long, "/undo", "the cat")
    assert len(end.turns) == 1
    (refusal,) = [note for note in notes if "max_model_len is 512" in note]
    assert refusal.endswith("The line is not part of the conversation")
    assert "/undo drops the last turn" in refusal
    assert end.turns[0].user == "the cat"
    assert printed.count("\n") >= 2


def test_an_answer_that_reaches_the_models_limit_has_a_note(llm):
    end, _, notes = talk(
        llm, "the cat and the other cat " * 10, params=replace(GREEDY, max_tokens=2000)
    )
    assert notes == ["[the answer ends at max_model_len (512): /undo or /reset makes room]"]
    assert end.stats is not None
    assert end.stats.prompt_tokens + end.stats.tokens == 512


def test_ctrl_c_stops_the_answer_and_keeps_its_text(llm):
    pieces = []
    notes = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    params = replace(GREEDY, max_tokens=400)
    end = chat(llm, params, lines=iter(["the cat", "the rain"]), show=show, note=notes.append)
    assert notes[0] == "[stopped]"
    stopped, complete = end.turns
    assert stopped == Exchange("the cat", "".join(pieces[:3]))
    (output,) = llm.chat([{"role": "user", "content": "the cat"}], params, use_tqdm=False)
    assert output.outputs[0].text.startswith(stopped.assistant)
    assert complete.user == "the rain"
    assert end.stats is not None
    assert end.stats.tokens > 3  # the second answer was not stopped


def test_ctrl_c_pressed_twice_interrupts_and_frees_all_blocks(llm):
    def show(piece: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        chat(llm, GREEDY, lines=iter(["the cat"]), show=show, note=lambda text: None)


def test_an_answer_stopped_before_its_first_token_is_empty(llm):
    session = Session(llm.engine, llm.tokenizer, llm.model.eos_token_ids)
    result = answer(session, [5, 6, 7], GREEDY, show=pytest.fail, stopped=lambda: True)
    assert (result.text, result.reason) == ("", "abort")
    assert (result.stats.tokens, result.stats.first_token) == (0, None)


def test_a_model_without_a_chat_template_is_an_error(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", replace(llm.tokenizer, chat_template=None))
    with refused("has no chat template, so it cannot chat; `pagedjax generate`"):
        talk(llm, "hello")


def test_a_template_that_refuses_the_system_text_is_an_error_at_the_start_or_a_note(
    llm, monkeypatch
):
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}the cat"
    monkeypatch.setattr(llm, "tokenizer", replace(llm.tokenizer, chat_template=refuses))
    with refused("refuses these messages: no system"):
        talk(llm, "hello", system="be brief")
    end, _, notes = talk(llm, "/system be brief", "hello", "/system off", "hello")
    assert "no system" in notes[1]
    assert len(end.turns) == 1


def test_a_conversation_is_saved_as_messages(llm, tmp_path):
    file = tmp_path / "talk.json"
    end, _, notes = talk(
        llm, "the cat", f"/save {file}", f"/save {tmp_path / 'nowhere' / 'x.json'}"
    )
    assert json.loads(file.read_text("utf-8")) == end.messages()
    assert notes[1] == f"2 messages saved to {file}"
    assert notes[2].startswith("not saved: ")


# as a command -------------------------------------------------------------------------------------

SMALL = ("--max-model-len", "64", "--max-tokens", "4", "--temperature", "0")


@pytest.mark.slow
def test_the_command_reads_lines_from_a_pipe_and_prints_only_the_answers(
    tiny_folder, tiny_llm, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\n/stats\nthe rain"))
    assert cli.main(["chat", "--model", str(tiny_folder), *SMALL]) == 0
    out, err = capsys.readouterr()
    end, printed, _ = talk(
        tiny_llm, "the cat", "the rain", params=SamplingParams(temperature=0, max_tokens=4)
    )
    assert out == printed
    assert "tokens in" in err
    assert "in the cache" in err
    assert ">" not in out
    assert len(end.turns) == 2


def test_errors_of_the_command_are_one_line(tiny_folder, capsys):
    assert cli.main(["chat", "--model", str(tiny_folder), "--top-p", "2"]) == 2
    assert "top_p is 2.0" in capsys.readouterr().err


def test_at_a_terminal_ctrl_c_gives_a_new_line_and_ctrl_d_ends(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed = iter(["hello", KeyboardInterrupt(), "again", EOFError()])

    def ask(prompt: str) -> str:
        word = next(typed)
        if isinstance(word, BaseException):
            raise word
        return word

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("builtins.input", ask)
    assert list(_read()) == ["hello", "again"]
    assert "Ctrl-D or /quit leaves" in capsys.readouterr().err
