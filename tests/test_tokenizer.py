"""Tokenizers from GGUF and from directories against independent oracles; detokenising; stop strings."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.tokenizer import Detokenizer, StopChecker, Tokenizer, load_tokenizer
from pagedjax.weights import open_checkpoint
from pagedjax.weights.gguf_tokenizer import SPLITS, build_tokenizer
from tests.weights.tiny import tiny_gguf, tiny_llama

GOLDENS = Path(__file__).parent / "goldens"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# what the published SmolLM2 tokenizer gives, as several projects recorded it in their own tests
PUBLISHED = [
    ("Hello world", [19556, 905]),
    ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
    ("The quick brown fox jumps over the lazy dog", [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767]),
    ("  leading spaces", [216, 2899, 5600]),
    ("The year 2024 had 365 days", [504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009]),
    ("def f(n):\n    return n+1\n", [1604, 275, 24, 94, 727, 472, 1003, 304, 27, 33, 198]),
    ("'s 't 're 've 'm 'll 'd", [506, 637, 100, 637, 257, 637, 307, 637, 93, 637, 764, 637, 84]),
    ("Grüße, café!", [27302, 7170, 34878, 85, 28, 37366, 17]),
    ("Hello, 世界!", [19556, 28, 216, 7906, 240, 178, 239, 230, 17]),
    ("<|im_start|>", [1]),
    ("", []),
]
# what it must be by the definition alone, worked out by hand: digits stand alone, bytes 0-9 of the alphabet from "!" on
BY_HAND = [("2024", [34, 32, 34, 36]), ("7", [39]), ("<|im_end|>", [2]), ("!", [17]), ("a", [81]), ("\n", [198])]

SAMPLES = [
    *(text for text, _ in PUBLISHED),
    " 2024", "3.14159", "1,000,000", "½ ² Ⅷ ٣", "v2.0-rc1",
    "a  b   c    d", "trailing   ", "   leading", "\n\n\n", "\t\tx\r\ny", "a\u00a0b\u3000c",
    "for (int i = 0; i < 10; ++i) {\n\treturn x[i] != nullptr;\n}\n", "import os\n\n\nclass A:\n    pass\n",
    "😀👍🏽👨‍👩‍👧 ok", "今天天气很好", "日本語のテキスト", "안녕하세요", "مرحبا بالعالم", "Привет, мир",
    "naïve façade Ångström",
    "I'm, you're, we'll, they'd, it's, I'VE", "don''t 'tis",
    "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|><repo_name>x",
    "<|im_start", "a<|im_end|>b", "\u0000\u0001\u007f", "\ufffd", "Ġ", "é́",
]  # fmt: skip
SCRIPTS = [
    st.characters(min_codepoint=0x20, max_codepoint=0x7E),
    st.characters(min_codepoint=0xA0, max_codepoint=0x24F),
    st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA5),
    st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3),
    st.characters(min_codepoint=0x1F600, max_codepoint=0x1F64F),
    st.sampled_from(" \t\n\r0123456789²Ⅷ٣'st'll\u00a0\u3000\u200d\u0301<|>"),
]
TEXTS = st.lists(st.one_of(*SCRIPTS, st.sampled_from(["<|im_end|>", "  ", "\n\n", "'re", " the"])), max_size=40).map(
    "".join
)


@cache
def smollm() -> Tokenizer:
    return load_tokenizer(open_checkpoint("smollm2-135m"))


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_llama(tmp_path)))


# --- an independent byte-level BPE ------------------------------------------------------------------------------------


def letters() -> dict[int, str]:
    """GPT-2's byte alphabet, by its definition: printable Latin-1 stands for itself, the rest counts on from U+0100."""
    table, extra = {}, 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


class BruteForce:
    """Byte-level BPE as defined: split, then merge the pair of lowest rank everywhere until none is left."""

    def __init__(self, metadata: dict, words: str, *, digits: bool, whole_words: bool = False) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        kinds = metadata["tokenizer.ggml.token_type"]
        special = [t for t, kind in zip(self.ids, kinds, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.words, self.digits, self.whole_words = regex.compile(words), digits, whole_words

    def encode(self, text: str) -> list[int]:
        out = []
        for index, part in enumerate(self.special.split(text)):
            out += [self.ids[part]] if index % 2 else [i for word in self.split(part) for i in self.merge(word)]
        return out

    def split(self, text: str) -> list[str]:
        pieces = regex.split(r"(\p{N})", text) if self.digits else [text]
        return [word for piece in pieces for word in self.words.findall(piece)]

    def merge(self, word: str) -> list[int]:
        symbols = [letters()[byte] for byte in word.encode()]
        if self.whole_words and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while True:
            pairs = [p for p in pairwise(symbols) if p in self.ranks]
            if not pairs:
                return [self.ids[symbol] for symbol in symbols]
            best, merged, at = min(pairs, key=self.ranks.__getitem__), [], 0
            while at < len(symbols):
                step = 2 if tuple(symbols[at : at + 2]) == best else 1
                merged.append("".join(symbols[at : at + step]))
                at += step
            symbols = merged


@cache
def smollm_oracle() -> BruteForce:
    return BruteForce(dict(open_checkpoint("smollm2-135m").metadata), GPT2_WORDS, digits=True)


@pytest.mark.parametrize(("text", "ids"), PUBLISHED + BY_HAND)
def test_embedded_tokenizer_gives_the_published_tokens(text, ids):
    assert smollm().encode(text) == ids


@pytest.mark.parametrize("text", SAMPLES)
def test_embedded_tokenizer_equals_brute_force(text):
    ids = smollm().encode(text)
    assert ids == smollm_oracle().encode(text)
    assert smollm().decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_embedded_tokenizer_equals_brute_force_on_any_text(text):
    ids = smollm().encode(text)
    assert ids == smollm_oracle().encode(text)
    assert smollm().decode(ids, skip_special_tokens=False) == text


def test_embedded_tokenizer_special_ids():
    tokenizer = smollm()
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.decode([1, 19556, 905, 2]) == "Hello world"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


# --- other pre-tokenizers ---------------------------------------------------------------------------------------------

ORACLES = {
    "gpt-2": {"words": GPT2_WORDS, "digits": False},
    "smollm": {"words": GPT2_WORDS, "digits": True},
    "llama-bpe": {"words": LLAMA3_WORDS, "digits": False, "whole_words": True},
    "qwen2": {"words": QWEN2_WORDS, "digits": False},
}


@cache
def embedded_as(pre: str) -> tuple:
    """The embedded vocabulary split another model's way: (our tokenizer, the oracle)."""
    metadata = {**open_checkpoint("smollm2-135m").metadata, "tokenizer.ggml.pre": pre}
    return build_tokenizer("test.gguf", metadata), BruteForce(metadata, **ORACLES[pre])


@pytest.mark.parametrize("pre", ORACLES)
@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_pre_tokenizers_equal_brute_force(pre, text):
    ours, oracle = embedded_as(pre)
    assert ours.encode(text).ids == oracle.encode(text)


def test_pre_tokenizers_differ_where_they_should():
    def pieces(pre: str, text: str) -> list[str]:
        return [piece for piece, _ in embedded_as(pre)[0].pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("smollm", "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert pieces("gpt-2", "in 2024") == ["in", "Ġ2024"]
    assert pieces("llama-bpe", "in 2024") == ["in", "Ġ", "202", "4"]
    assert pieces("qwen2", "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert pieces("llama-bpe", "IT'S\n\nok") == ["IT", "'S", "ĊĊ", "ok"]
    assert pieces("smollm", "IT'S\n\nok") == ["IT", "'", "S", "Ċ", "Ċ", "ok"]


def test_llama3_adds_bos_unless_the_file_says_otherwise():
    metadata = dict(open_checkpoint("smollm2-135m").metadata) | {"tokenizer.ggml.pre": "llama-bpe"}
    assert build_tokenizer("x", metadata).encode("Hello").ids == [19556]  # the file says not to
    del metadata["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer("x", metadata).encode("Hello").ids == [1, 19556]
    assert build_tokenizer("x", metadata).encode("Hello", add_special_tokens=False).ids == [19556]
    assert build_tokenizer("x", metadata | {"tokenizer.ggml.add_eos_token": True}).encode("Hello").ids == [1, 19556, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is 'default'.*known are gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; 'gpt2'.*and 'llama'"),
        ({"tokenizer.ggml.tokens": []}, "the vocabulary has 0 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "and 1 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' is not two tokens"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, "do not fit together"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores for 320 tokens"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 999}, "adds BOS, but .* is 999"),
    ],
)
def test_tokenizers_that_cannot_be_built_right_are_refused(tmp_path, change, message):
    metadata = {**open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path))).metadata, **change}
    with pytest.raises(ValueError, match=f"(?s)m.gguf.*{message}"):
        build_tokenizer(tmp_path / "m.gguf", metadata)


def test_every_known_pre_tokenizer_has_an_oracle():
    assert {SPLITS[name] for name in ORACLES} == set(SPLITS.values())


def test_user_defined_tokens_are_matched_whole_and_not_skipped(tmp_path):
    folder = tiny_llama(tmp_path)
    metadata = dict(open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder)).metadata)
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens[-1], kinds[-1] = "<think>", 4
    merges = [m for m in metadata["tokenizer.ggml.merges"] if "".join(m.split(" ")) in tokens]
    built = build_tokenizer(
        "x",
        metadata
        | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges},
    )
    ids = built.encode("a<think>b").ids
    assert ids[1] == len(tokens) - 1
    assert built.decode(ids) == "a<think>b"


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@cache
def sentencepiece_golden() -> dict:
    return json.loads((GOLDENS / "sentencepiece.json").read_text(encoding="utf-8"))


def sentencepiece_metadata(**extra) -> dict:
    golden = sentencepiece_golden()
    lists = {f"tokenizer.ggml.{key}": golden[key] for key in ("tokens", "scores", "token_type")}
    return lists | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, **extra}


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(build_tokenizer("x", sentencepiece_metadata()), (2,), {})


def test_scores_give_what_the_sentencepiece_library_gives():
    tokenizer = sentencepiece()
    for text, ids, decoded in sentencepiece_golden()["encodings"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == decoded


def test_sentencepiece_adds_bos_and_the_space_unless_told_not_to():
    assert sentencepiece().encode("the") == [1, *sentencepiece().encode("the", add_special_tokens=False)]
    off = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer(build_tokenizer("x", sentencepiece_metadata(**off)), (2,), {})
    assert plain.backend.encode("the").tokens == ["the"]
    assert plain.decode(plain.encode(" the")) == " the"
    with pytest.raises(ValueError, match="removes extra spaces"):
        build_tokenizer("x", sentencepiece_metadata(**{"tokenizer.ggml.remove_extra_whitespaces": True}))


def test_sentencepiece_pieces_and_words_are_spaced_by_their_context():
    tokenizer = sentencepiece()
    the, cat = (tokenizer.backend.token_to_id(piece) for piece in ("▁the", "▁cat"))
    assert tokenizer.decode_token(cat) == " cat"
    after_text = Detokenizer(tokenizer, [1, the])
    assert after_text.push(cat) == " cat"
    at_start = Detokenizer(tokenizer, [1])
    assert [at_start.push(the), at_start.push(cat)] == ["the", " cat"]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=" thecandog\né中😀", max_size=30))
def test_sentencepiece_pushes_join_to_the_text(text):
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


# --- directories ------------------------------------------------------------------------------------------------------


def test_directory_and_gguf_give_one_tokenizer(tmp_path):
    folder = tiny_llama(tmp_path)
    one, other = (load_tokenizer(open_checkpoint(p)) for p in (folder, tiny_gguf(tmp_path / "m.gguf", folder)))
    for text in SAMPLES:
        assert one.encode(text) == other.encode(text)
    messages = [{"role": "user", "content": "the cat"}]
    assert one.apply_chat_template(messages) == other.apply_chat_template(messages)
    assert (one.eos_token_ids, other.eos_token_ids) == ((0, 2), (2,))


def test_directory_ignores_truncation_and_reads_template_files(tmp_path):
    folder = tiny_llama(tmp_path)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tools", "template": "T"}, {"name": "default", "template": "abc"}]
    config["eos_token"] = {"content": "<|im_start|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert len(tokenizer.encode("qwrtp")) == 5
    assert tokenizer.eos_token_ids == (0, 1, 2)
    hello = [{"role": "user", "content": "hello"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(hello)) == "abc"
    (folder / "chat_template.jinja").write_text("from the file")
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.decode(tokenizer.apply_chat_template(hello)) == "from the file"


def test_directories_without_a_usable_tokenizer_say_so(tmp_path):
    folder = tiny_llama(tmp_path)
    checkpoint = open_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(checkpoint)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; write one with"):
        load_tokenizer(checkpoint)


# --- chat templates ---------------------------------------------------------------------------------------------------


def test_embedded_chat_template_gives_the_published_tokens():
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    ids = smollm().apply_chat_template([{"role": "user", "content": "Hi there"}])
    assert ids == [1, *system, 2, 198, 1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198]
    without = smollm().apply_chat_template([{"role": "user", "content": "Hi there"}], add_generation_prompt=False)
    assert without == ids[:-4]


def test_chat_template_errors_are_told(tiny):
    with pytest.raises(ValueError, match="must be a mapping with 'role' and 'content'"):
        tiny.apply_chat_template([{"role": "user"}])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tiny.backend, (2,), {}).apply_chat_template([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="at least one message"):
        tiny.apply_chat_template([])
    refusing = Tokenizer(tiny.backend, (2,), {"eos_token": "<|im_end|>"}, "{{ raise_exception('no ' + eos_token) }}")
    with pytest.raises(ValueError, match=r"refuses these messages: no <\|im_end\|>"):
        refusing.apply_chat_template([{"role": "user", "content": "hello"}])


# --- detokenising -----------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151) | st.integers(17, 272), max_size=30), st.booleans())
def test_pushes_and_flush_join_to_the_decoded_whole(ids, skip):
    stream = Detokenizer(smollm(), skip_special_tokens=skip)
    assert "".join(map(stream.push, ids)) + stream.flush() == smollm().decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(0, 40))
def test_output_follows_any_split_of_a_text_without_prompt_or_broken_characters(text, cut):
    ids = smollm().encode(text)
    cut = min(cut, len(ids))
    stream = Detokenizer(smollm(), ids[:cut], skip_special_tokens=False)
    pieces = [stream.push(i) for i in ids[cut:]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""
    whole_characters = smollm().decode(ids[:cut], skip_special_tokens=False).rstrip("\ufffd")
    assert whole_characters + "".join(pieces) == text


def test_a_character_arrives_only_when_it_is_whole():
    ids = smollm().encode("😀!")
    stream = Detokenizer(smollm())
    assert [stream.push(i) for i in ids] == ["", "", "😀", "!"]
    stream = Detokenizer(smollm())
    assert [stream.push(i) for i in ids[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_a_prompt_that_ends_inside_a_character_does_not_leak():
    first, second, third, mark = smollm().encode("😀!")
    finished = Detokenizer(smollm(), [*smollm().encode("prompt text"), first])
    assert [finished.push(i) for i in (second, third, mark)] == ["", "😀", "!"]
    broken = Detokenizer(smollm(), [*smollm().encode("prompt text"), first])
    assert broken.push(mark) + broken.flush() == "!"
    nothing = Detokenizer(smollm(), [*smollm().encode("prompt text"), first])
    assert nothing.flush() == ""


def test_ids_beyond_the_vocabulary_have_no_text(tiny):
    stream = Detokenizer(tiny)
    assert stream.push(100_000) == ""
    assert tiny.decode_token(100_000) == ""
    assert tiny.decode([100_000]) == ""


def test_the_window_serves_decoders_that_look_at_neighbours():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, (), {})
    assert tokenizer.coding is None
    stream = Detokenizer(tokenizer, [1])
    assert [stream.push(i) for i in (2, 3, 2)] == ["b", " c", "b"]
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, [1, 2, 3])) + stream.flush() == "ab c"
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
    assert max(times) < 0.2, f"2000 tokens took {times} s"  # a few milliseconds; re-decoding would take seconds


def test_token_pieces_for_logprobs():
    assert [smollm().decode_token(i) for i in smollm().encode(" my name")] == [" my", " name"]
    assert smollm().decode_token(smollm().encode("😀")[0]) == "\ufffd"
    assert smollm().decode_token(2) == "<|im_end|>"


def test_encode_refuses_what_is_no_text(tiny):
    with pytest.raises(ValueError, match="the text is a int; encode takes a string"):
        tiny.encode(3)
    with pytest.raises(ValueError, match="half of a surrogate pair at character 1"):
        tiny.encode("a\ud800")


# --- stop strings -----------------------------------------------------------------------------------------------------


def brute_stop(text: str, stop: tuple[str, ...], include: bool, after: int) -> tuple[str, bool]:
    """Over the whole text: the match that ends first (after `after` characters), the longest of several."""
    matches = [(i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > after]
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


@settings(max_examples=600, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.integers(0, 20), max_size=6), st.lists(st.integers(0, 20), max_size=6))
def test_chunks_do_not_change_where_the_text_stops(text, one, other):
    def cut(places: list[int]) -> list[str]:
        edges = [0, *sorted(min(p, len(text)) for p in places), len(text)]
        return [text[a:b] for a, b in pairwise(edges)]

    assert run_stop(cut(one), StopChecker(("abc", "cb"))) == run_stop(cut(other), StopChecker(("abc", "cb")))


def test_only_what_may_become_a_stop_string_is_held_back():
    checker = StopChecker(("</s>", "END"))
    assert checker.push("hello <") == ("hello ", False)
    assert checker.push("b> EN") == ("<b> ", False)
    assert checker.push("D and more") == ("", True)
    assert StopChecker(()).push("text") == ("text", False)


def test_stop_strings_do_not_count_before_min_tokens():
    checker = StopChecker(("b",), min_tokens=2)
    assert [checker.push(text) for text in ("b", "ab", "ab")] == [("b", False), ("ab", False), ("a", True)]
    late = StopChecker(("ab",), min_tokens=1)  # begins in the first token, complete in the second
    assert [late.push("a"), late.push("b")] == [("", False), ("", True)]


def test_finish_searches_the_flushed_text_and_gives_out_the_rest():
    checker = StopChecker(("ab",))
    checker.push("xa")
    assert checker.finish() == ("a", False)
    checker = StopChecker(("a\ufffd",), include_stop_str_in_output=True)
    assert checker.push("xa") == ("x", False)
    assert checker.finish("\ufffd") == ("a\ufffd", True)


# --- the price of importing -------------------------------------------------------------------------------------------


def test_importing_is_light():
    heavy = ("jax", "transformers", "tokenizers", "gguf", "torch", "huggingface_hub", "tqdm")
    code = f"import sys, pagedjax.tokenizer, pagedjax.weights; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=GOLDENS.parents[1]
    )
    assert done.stdout.strip() == "[]"


def test_the_embedded_tokenizer_and_template_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pagedjax.tokenizer import load_tokenizer; from pagedjax.weights import open_checkpoint\n"
        "t = load_tokenizer(open_checkpoint('smollm2-135m'))\n"
        "print(len(t.apply_chat_template([{'role': 'user', 'content': 'Hi there'}])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=GOLDENS.parents[1]
    )
    assert (done.stdout.strip(), done.stderr) == ("32", "")
