"""Write sentencepiece.json: a small SentencePiece BPE model and how the sentencepiece library
itself encodes with it.

    pip install sentencepiece && python tests/goldens/make_sentencepiece.py      # from the repository's root

It is trained as Llama's tokenizer was: BPE, byte fallback, digits apart, a space put before the
text, no clean-up. Training breaks ties as it likes, so a new run may give another vocabulary; the
encodings always belong to it.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece

HERE = Path(__file__).resolve().parent
VOCAB = 640
WORDS = "the cat sat on mat and dog ran over hill while rain fell softly house window their other there then he she"
TEXTS = [
    "the cat and the dog",
    " leading space",
    "  two leading spaces",
    "trailing space ",
    "many    spaces   between     words",
    "a tab\there and a\nnew line\n\n",
    "in 2024, 1234567890 things",
    "def f(x):\n    return x + 1\n",
    "It's I'm you'll they've",
    "été, naïve, Straße",
    "中文字符 and 日本語",
    "emoji 😀👍🏽 end",
    "\u2581 is the space mark",
    "",
    " ",
    "aaaaaaa ththththth",
    "x" * 40,
    "The Cat SAT",
]


def corpus() -> list[str]:
    rng = random.Random(0)
    words = WORDS.split()
    lines = [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(2000)]
    return (
        lines
        + [line.replace(" ", "  ") for line in lines[:200]]
        + [f"    {line}" for line in lines[:300]]
    )


def token_type(sp: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    """The type of a token, numbered as in GGUF's tokenizer.ggml.token_type."""
    if sp.is_unknown(token_id):
        return 2
    if sp.is_control(token_id):
        return 3
    return 6 if sp.is_byte(token_id) else 1


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        hard_vocab_limit=False,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(sp.get_piece_size())
    rng = random.Random(1)
    alphabet = "  \n" + "thecandogr" + "é中7"
    texts = TEXTS + ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(150)]
    result = {
        "command": "python tests/goldens/make_sentencepiece.py",
        "version": sentencepiece.__version__,
        "tokens": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "token_type": [token_type(sp, i) for i in ids],
        "encodings": [[text, sp.encode(text), sp.decode(sp.encode(text))] for text in texts],
    }
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "sentencepiece.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
