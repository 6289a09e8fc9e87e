"""Build the tokenizer of a GGUF file, which splits text exactly as the model's original one does.

The file names its pre-tokenizer (`tokenizer.ggml.pre`) but does not define it. A wrong one still
gives tokens, but not those that the model was trained on. So an unknown name is an error.
(transformers makes this mistake with "smollm": its conversion does not split digits.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# values of tokenizer.ggml.token_type
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4

# The words of Llama 3 and Qwen 2. %s is how many digits stay together, in which they differ.
WORDS_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The words of GPT-4o: a word has capital letters at its start only, and its contraction with it.
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CAPITALS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORDS_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{CAPITALS}]*[{SMALL}]+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{CAPITALS}]+[{SMALL}]*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizerSpec(NamedTuple):
    """What a byte-level pre-tokenizer does.

    digits: every digit is split off first.
    words: the pattern of words; None: GPT-2's pattern.
    ignore_merges: a word that is in the vocabulary is one token, even if the merges do not make it.
    add_bos: whether BOS is added if the file has no key tokenizer.ggml.add_bos_token.
    nfc: the text is composed first (Unicode's normalization form C).
    """

    digits: bool = False
    words: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


GPT2 = PreTokenizerSpec()
DIGITS = PreTokenizerSpec(digits=True)
LLAMA3 = PreTokenizerSpec(words=WORDS_GPT4 % "{1,3}", ignore_merges=True, add_bos=True)
GPT4 = PreTokenizerSpec(words=WORDS_GPT4 % "{1,3}")
GPT4O = PreTokenizerSpec(words=WORDS_GPT4O)
QWEN2 = PreTokenizerSpec(words=WORDS_GPT4 % "", nfc=True)
# "default" is not here: llama.cpp uses it, with a warning, for models that its converter did not
# know.
PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "dbrx": GPT4,  # Phi 4 too
    "gpt-4o": GPT4O,  # Phi 4 mini
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}


def build_tokenizer(path: Any, metadata: Mapping[str, Any]) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a GGUF file's metadata.

    Raises:
        ValueError: no vocabulary, an unknown kind or pre-tokenizer (lists the known ones), or
            damaged lists.
    """
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in builders:
        raise ValueError(
            f"{path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE); for others use the model's Hugging Face directory"
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{path}: the vocabulary has {len(tokens)} tokens, {len(set(tokens))} of them "
            f"distinct, and {len(types)} token types; the file is damaged, fetch or convert it "
            "again"
        )
    try:
        tokenizer, add_bos = builders[kind](path, metadata, tokens, types)
    except ValueError:
        raise
    except Exception as error:
        # tokenizers raises plain Exceptions, e.g. for a merge of unknown tokens
        raise ValueError(
            f"{path}: the vocabulary and its merges do not fit together ({error})"
        ) from error
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
    _add_whole_tokens(tokenizer, tokens, types, strips_spaces=is_phi3)
    _add_bos_eos(path, tokenizer, metadata, tokens, add_bos)
    return tokenizer


def _byte_level(
    path: Any, metadata: Mapping[str, Any], tokens: list[str], _: list[int]
) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}; use the model's Hugging Face directory instead"
        )
    spec = PRE_TOKENIZERS[pre]
    merges = [_split_merge(path, merge) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=spec.ignore_merges))
    if spec.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if spec.digits else []
    if spec.words is not None:
        steps.append(pre_tokenizers.Split(Regex(spec.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=spec.words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, spec.add_bos


def _split_merge(path: Any, merge: str) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not (first and space and second):
        raise ValueError(
            f"{path}: the merge {merge!r} is not two tokens separated by a space; fetch the file "
            "again"
        )
    return first, second


def _sentencepiece(
    path: Any, metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE as Hugging Face stores it: merges ranked by score, spaces as U+2581, bytes
    as fallback.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ValueError(
            f"{path}: the tokenizer removes extra spaces; use the model's Hugging Face directory "
            "instead"
        )
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ValueError(
            f"{path}: {len(scores)} scores for {len(tokens)} tokens; the file is damaged, fetch it "
            "again"
        )
    merge_texts = metadata.get("tokenizer.ggml.merges")
    merges = (
        [_split_merge(path, merge) for merge in merge_texts]
        if merge_texts
        else score_merges(tokens, scores, types)
    )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown_token = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def score_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: all pairs of pieces that join to a piece.

    Merges to the piece with the best score come first. Among the merges to one piece, the merge
    with the longest first part comes first.
    """
    score = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    merges = [
        (-value, -cut, piece[:cut], piece[cut:])
        for piece, value in score.items()
        for cut in range(1, len(piece))
        if piece[:cut] in score and piece[cut:] in score
    ]
    return [(first, second) for _, _, first, second in sorted(merges)]


def _add_whole_tokens(
    tokenizer: Tokenizer, tokens: list[str], types: list[int], *, strips_spaces: bool
) -> None:
    """Add the control, unknown and user-defined tokens.

    They are matched whole in the text, before it is split.

    Args:
        strips_spaces: control tokens, and "</s>", take the spaces and line breaks behind them, as
            in a Phi 3. No key of the file says it.
    """
    from tokenizers import AddedToken

    special = [
        AddedToken(
            token,
            normalized=False,
            special=True,
            rstrip=strips_spaces and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN)
    ]
    user_defined = [
        AddedToken(token, normalized=False, special=False, rstrip=strips_spaces and token == "</s>")
        for token, kind in zip(tokens, types, strict=True)
        if kind == USER_DEFINED
    ]
    # Each call builds the search of all added tokens anew. A Gemma has 6,400 of them.
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)


def _add_bos_eos(
    path: Any,
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    default_bos: bool,
) -> None:
    """Add BOS before and EOS after a text if the file says so.

    Args:
        default_bos: whether to add BOS if the file does not say.
    """
    from tokenizers import processors

    template = "$A"
    special = []
    for name, default in (("bos", default_bos), ("eos", False)):
        if not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None or index >= len(tokens):
            raise ValueError(
                f"{path}: the tokenizer adds {name.upper()}, but tokenizer.ggml.{name}_token_id is "
                f"{index}"
            )
        template = (
            f"{tokens[index]}:0 {template}" if name == "bos" else f"{template} {tokens[index]}:0"
        )
        special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
