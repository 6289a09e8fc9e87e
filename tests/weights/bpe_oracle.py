"""An independent byte-level BPE, an independent SentencePiece BPE, and texts to test tokenizers
with.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from itertools import pairwise

import regex
from hypothesis import strategies as st

from pagedjax.text.tokenizer import Tokenizer
from pagedjax.weights import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# as in tiktoken's o200k_base
GPT4O_WORDS = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

SAMPLES = [
    "", "Hello world", "  leading spaces", "The year 2024 had 365 days", "'s 't 're 've 'm 'll 'd", "Grüße, café!",
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
TEXTS = st.lists(
    st.one_of(*SCRIPTS, st.sampled_from(["<|im_end|>", "  ", "\n\n", "'re", " the"])), max_size=40
).map("".join)


@cache
def smollm() -> Tokenizer:
    """The embedded model's tokenizer."""
    return load_tokenizer(open_checkpoint("smollm2-135m"))


def letters() -> dict[int, str]:
    """GPT-2's byte alphabet, by its definition: printable Latin-1 is itself, the others are
    numbered from U+0100.
    """
    table = {}
    extra = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


class BruteForce:
    """Byte-level BPE as defined: split, then merge all pairs of the lowest rank until no pair has a
    rank.
    """

    def __init__(
        self,
        metadata: dict,
        words: str,
        *,
        digits: bool,
        whole_words: bool = False,
        composed: bool = False,
    ) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {
            tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])
        }
        kinds = metadata["tokenizer.ggml.token_type"]
        special = [t for t, kind in zip(self.ids, kinds, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.words = regex.compile(words)
        self.digits = digits
        self.whole_words = whole_words
        self.composed = composed

    def encode(self, text: str) -> list[int]:
        out = []
        for index, part in enumerate(self.special.split(text)):
            out += (
                [self.ids[part]]
                if index % 2
                else [i for word in self.split(part) for i in self.merge(word)]
            )
        return out

    def split(self, text: str) -> list[str]:
        if self.composed:
            text = unicodedata.normalize("NFC", text)
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
            best = min(pairs, key=self.ranks.__getitem__)
            merged = []
            at = 0
            while at < len(symbols):
                step = 2 if tuple(symbols[at : at + 2]) == best else 1
                merged.append("".join(symbols[at : at + step]))
                at += step
            symbols = merged


class BruteForceSentencePiece:
    """SentencePiece's BPE as defined: tokens that are matched whole split the text; then the pair
    that makes the piece with the best score is merged, the first of equal ones, until none is left.
    """

    def __init__(self, metadata: dict, *, space_first: bool) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        kinds = metadata["tokenizer.ggml.token_type"]
        scores = metadata["tokenizer.ggml.scores"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
        special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (2, 3, 4)]
        longest_first = sorted(special, key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")
        self.prefix = "▁" if space_first else ""

    def encode(self, text: str) -> list[int]:
        out = []
        for index, part in enumerate(self.special.split(text)):
            if index % 2:
                out.append(self.ids[part])
            elif part:
                out += self.merge(list(self.prefix + part.replace(" ", "▁")))
        return out

    def merge(self, symbols: list[str]) -> list[int]:
        while True:
            joined = [a + b for a, b in pairwise(symbols)]
            pairs = [i for i, piece in enumerate(joined) if piece in self.scores]
            if not pairs:
                break
            best = max(pairs, key=lambda i: (self.scores[joined[i]], -i))
            symbols[best : best + 2] = [joined[best]]
        out = []
        for symbol in symbols:
            if symbol in self.ids:
                out.append(self.ids[symbol])
            else:
                out += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return out
