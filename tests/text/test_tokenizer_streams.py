"""Text token by token, compared with the whole text: detokenising and stop strings."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.options.params import SamplingParams
from pagedjax.text.outputs import OutputBuilder, StopChecker
from pagedjax.text.tokenizer import Detokenizer, Tokenizer
from pagedjax.weights import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer
from tests.weights.bpe_oracle import TEXTS, smollm
from tests.weights.tiny import tiny_llama

# --- detokenising ---------------------------------------------------------------------------------


def pushed(stream: Detokenizer, ids) -> list[str]:
    return [stream.push(i) for i in ids]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 49151) | st.integers(17, 272), max_size=30), st.booleans())
def test_pushes_and_flush_join_to_the_decoded_whole(ids, skip):
    stream = Detokenizer(smollm(), skip_special_tokens=skip)
    text = "".join(pushed(stream, ids)) + stream.flush()
    assert text == smollm().decode(ids, skip_special_tokens=skip)


@settings(max_examples=150)
@given(TEXTS, st.integers(0, 40))
def test_output_continues_a_prompt_without_its_text_or_broken_characters(text, cut):
    ids = smollm().encode(text)
    cut = min(cut, len(ids))
    stream = Detokenizer(smollm(), ids[:cut], skip_special_tokens=False)
    pieces = [stream.push(i) for i in ids[cut:]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""
    whole_characters = smollm().decode(ids[:cut], skip_special_tokens=False).rstrip("\ufffd")
    assert whole_characters + "".join(pieces) == text


class CountingPrompt(list[int]):
    """A prompt that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, at):
        part = super().__getitem__(at)
        self.read += len(part) if isinstance(at, slice) else 1
        return part

    def __iter__(self):
        for token in super().__iter__():
            self.read += 1
            yield token

    def __reversed__(self):
        return iter(self[::-1])


@pytest.mark.parametrize("special", [False, True], ids=["text", "only-special-tokens"])
def test_branches_read_a_constant_number_of_prompt_tokens(special):
    """Reading all of it for 64 branches of a prompt of 100,000 tokens blocked the engine's thread
    for 268 ms.
    """
    ids = [0] if special else smollm().encode("some words of a prompt ")
    prompt = CountingPrompt(ids * (100_000 // len(ids)))
    branches = [
        OutputBuilder(i, SamplingParams(n=64), smollm(), prompt, frozenset()) for i in range(64)
    ]
    assert prompt.read <= 64 * 256
    assert "".join(branches[-1].push(i, None) for i in smollm().encode(" and more")) == " and more"


def test_an_incomplete_character_before_special_tokens_of_a_prompt_is_completed():
    first, *later_tokens = smollm().encode("😀!")
    stream = Detokenizer(smollm(), [*smollm().encode("text"), first, *[0] * 200])
    assert "".join(pushed(stream, later_tokens)) == "😀!"


def test_a_character_is_returned_only_when_it_is_complete():
    ids = smollm().encode("😀!")
    assert pushed(Detokenizer(smollm()), ids) == ["", "", "😀", "!"]
    stream = Detokenizer(smollm())
    assert pushed(stream, ids[:2]) == ["", ""]
    assert stream.flush() == "\ufffd"


def test_an_incomplete_character_of_the_prompt_is_not_in_the_output():
    first, second, third, mark = smollm().encode("😀!")
    prompt = [*smollm().encode("prompt text"), first]
    assert pushed(Detokenizer(smollm(), prompt), (second, third, mark)) == ["", "😀", "!"]
    broken = Detokenizer(smollm(), prompt)
    assert broken.push(mark) + broken.flush() == "!"
    assert Detokenizer(smollm(), prompt).flush() == ""


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path):
    tiny = load_tokenizer(open_checkpoint(tiny_llama(tmp_path)))
    stream = Detokenizer(tiny)
    assert stream.push(100_000) == ""
    assert tiny.decode_token(100_000) == ""
    assert tiny.decode([100_000]) == ""


def test_decoders_that_depend_on_neighbouring_tokens():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, (), {})
    assert tokenizer.coding is None
    assert pushed(Detokenizer(tokenizer, [1]), (2, 3, 2)) == ["b", " c", "b"]
    stream = Detokenizer(tokenizer)
    assert "".join(pushed(stream, [1, 2, 3])) + stream.flush() == "ab c"
    assert tokenizer.decode_token(3) == "c"


def test_detokenising_costs_the_same_for_every_token():
    ids = smollm().encode("The quick brown fox jumps over the lazy dog. ") * 400
    stream = Detokenizer(smollm(), ids)
    list(map(stream.push, ids[:500]))  # warm
    times = []
    for part in (ids[:2000], ids[2000:4000]):
        start = time.perf_counter()
        list(map(stream.push, part))
        times.append(time.perf_counter() - start)
    # a few milliseconds; re-decoding would take seconds
    assert max(times) < 0.2, f"2000 tokens took {times} s"


# --- stop strings ---------------------------------------------------------------------------------


def brute_stop(text: str, stop: tuple[str, ...], include: bool, after: int) -> tuple[str, bool]:
    """Searches the whole text: the match that ends first (after `after` characters), the longest of
    several.
    """
    matches = [(i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i)]
    matches = [(end, start) for end, start in matches if end > after]
    if not matches:
        return text, False
    end, start = min(matches)
    return text[: end if include else start], True


def run_stop(chunks: list[str], checker: StopChecker) -> tuple[str, bool]:
    out = ""
    for chunk in chunks:
        piece, stopped = checker.push(chunk)
        out += piece
        if stopped:
            return out, True
    piece, stopped = checker.finish()
    return out + piece, stopped


@settings(max_examples=600)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple),
    st.integers(0, 5),
    st.booleans(),
)
def test_stop_strings_equal_a_search_of_the_whole_text(chunks, stop, min_tokens, include):
    checker = StopChecker(stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    after = len("".join(chunks[:min_tokens]))
    assert run_stop(chunks, checker) == brute_stop("".join(chunks), stop, include, after)


def test_only_a_possible_start_of_a_stop_string_is_kept_back():
    checker = StopChecker(("</s>", "END"))
    assert checker.push("hello <") == ("hello ", False)
    assert checker.push("b> EN") == ("<b> ", False)
    assert checker.push("D and more") == ("", True)
    assert StopChecker(()).push("text") == ("text", False)


def test_a_token_is_fast_with_long_stop_strings():
    checker = StopChecker(("a" * 999 + "b", *("x" * i for i in range(937, 1000))))
    start = time.thread_time()  # of the processor: other work on the machine does not count
    for _ in range(900):
        assert checker.push("a") == ("", False)
    assert time.thread_time() - start < 2  # 0.1 s; trying every prefix takes 5 s


def test_finish_searches_the_flushed_text_and_returns_the_rest():
    checker = StopChecker(("ab",))
    checker.push("xa")
    assert checker.finish() == ("a", False)
    checker = StopChecker(("a\ufffd",), include_stop_str_in_output=True)
    assert checker.push("xa") == ("x", False)
    assert checker.finish("\ufffd") == ("a\ufffd", True)
