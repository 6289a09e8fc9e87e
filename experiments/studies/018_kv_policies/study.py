"""018: what queries that read less cost in quality, and save in memory and time.

Sources: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453), tables 1 and 2; Quest (Tang et al. 2024,
arXiv 2406.10774), table 1 and section 3. The study has no config: it measures log-probabilities of
text, answers, and the time of attention alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import figures
from experiments.bench.quality import windows_of
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    exactly,
    interval,
    markdown,
    rounded,
    span,
)
from pagedjax import LLM, SamplingParams, load_model
from pagedjax.device import cache
from pagedjax.engine import compilations
from pagedjax.weights.pretrained import DEFAULT_MODEL, LoadedModel

from . import timed
from .timed import Times

QUESTION = "What do KV policies cost in quality, and what do they save?"
STREAMING = "StreamingLLM (Xiao et al. 2023), {}"
QUEST = "Quest (Tang et al. 2024), {}"
SINKS = 4
# tokens of a block
SMALL = 4  # for streaming, so that 4 sinks are a block
PAGE = 16  # as in Quest's paper
NEEDLE = " The pass key is {0}. Remember it. {0} is the pass key. "
HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
TAIL = "\nWhat is the pass key? The pass key is "
WHY_MODEL = (
    "how much a model relies on its first tokens differs from model to model, and ours is "
    "SmolLM2-135M"
)
WHY_RECOMPUTED = (
    "here keys keep their positions and the sinks stay far away; the paper numbers the tokens anew"
)
WHY_KEYS = (
    "64 tokens are 4 blocks of a model of 135M, where the paper's are 32 blocks of one of 7B; a "
    "selection for each query head, as in the paper, found as few in 128 tokens, and 90 % in 512, "
    "where ours found 70 %"
)
WHY_TIME = (
    "the published time is of CUDA kernels on an RTX 4090; here scores are computed by XLA on a CPU"
)


class Size(NamedTuple):
    """The sizes of the three measurements: of text, of pass keys and of the time of attention."""

    windows: int  # of text
    length: int  # tokens of a window; log-probabilities count in its second half
    sizes: tuple[int, ...]  # tokens that a query of the text reads at most
    fixed: int  # the one of `sizes` for the claims about sinks
    recomputed: int  # tokens of the text that are computed anew from the last `fixed` tokens alone

    keys: int  # prompts with a pass key
    hidden: int  # tokens of such a prompt
    budgets: tuple[int, ...]  # tokens that a query of such a prompt reads at most

    contexts: tuple[int, ...]  # tokens of a sequence, for the time of attention
    batch: int  # sequences
    rounds: int
    read: int  # tokens that a selection keeps


FULL = Size(
    windows=3,
    length=2048,
    sizes=(64, 128, 256, 512),
    fixed=256,
    recomputed=96,
    keys=10,
    hidden=1024,
    budgets=(64, 512),
    contexts=(4096, 8192, 16384, 32768),
    batch=4,
    rounds=9,
    read=2048,
)
QUICK = Size(
    windows=1,
    length=384,
    sizes=(64, 128),
    fixed=128,
    recomputed=4,
    keys=2,
    hidden=256,
    budgets=(64,),
    contexts=(1024, 2048),
    batch=1,
    rounds=2,
    read=256,
)


def streaming(tokens: int, sinks: int = SINKS) -> dict[str, Any]:
    """Engine options with which a query sees at most `tokens` tokens, the first `sinks` among them."""
    window = tokens - sinks - SMALL + 1  # the rest of its first block is seen too
    return {
        "block_size": SMALL,
        "kv_policy": {"name": "streaming", "sinks": sinks, "window": window},
    }


def quest(tokens: int, *, dense_prompts: bool) -> dict[str, Any]:
    options = {"name": "quest", "tokens": tokens, "dense_prompts": dense_prompts}
    return {"block_size": PAGE, "kv_policy": options}


def engine(model: LoadedModel, length: int, sequences: int, **options: Any) -> LLM:
    budget = min(512, length)
    sizes: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": budget,
    }
    blocks = sequences * math.ceil(length / options.get("block_size", PAGE))
    common: dict[str, Any] = {
        "token_buckets": (sequences, budget),
        "num_blocks": blocks,
        "enable_prefix_caching": False,
    }
    return LLM(model, progress=False, compilation="lazy", **(sizes | common | options))


def logprobs(llm: LLM, windows: Sequence[Sequence[int]], last: int) -> np.ndarray:
    """The log-probabilities [windows, last] of the last tokens of each window."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([list(window) for window in windows], params, use_tqdm=False)
    values = []
    for output, window in zip(outputs, windows, strict=True):
        assert output.prompt_logprobs is not None, "SamplingParams asks for them"
        rows = output.prompt_logprobs[-last:]
        values.append(
            [
                row[token].logprob
                for row, token in zip(rows, window[-last:], strict=True)
                if row is not None
            ]
        )
    return np.array(values)


class Texts(NamedTuple):
    """Log-probabilities of the same tokens under each policy, [windows, length / 2] unless stated
    otherwise.
    """

    full: np.ndarray
    streaming: Mapping[int, np.ndarray]  # by tokens
    quest: Mapping[int, np.ndarray]
    window: np.ndarray  # `fixed` tokens without sinks
    more_sinks: np.ndarray  # `fixed` tokens, twice as many sinks
    recomputed: np.ndarray  # [size.recomputed] some tokens, from the last `fixed` tokens alone
    of_recomputed: np.ndarray  # [size.recomputed] the same tokens, streaming


def texts(model: LoadedModel, size: Size) -> Texts:
    half = size.length // 2
    plain = engine(model, size.length + 1, size.windows)
    windows = windows_of(plain, size.windows, size.length)

    def logprobs_under(options: Mapping[str, Any]) -> np.ndarray:
        return logprobs(engine(model, size.length + 1, size.windows, **options), windows, half)

    streamed = {tokens: logprobs_under(streaming(tokens)) for tokens in size.sizes}
    # indices in the second halves of all windows, one after the other
    places = np.linspace(0, size.windows * half - 1, size.recomputed).astype(int)
    pieces = []
    for place in places:
        window, index = divmod(place, half)
        end = half + index + 1  # behind the token
        pieces.append(windows[window][end - size.fixed : end])
    anew = logprobs(engine(model, size.fixed + 1, size.windows), pieces, 1)
    return Texts(
        full=logprobs(plain, windows, half),
        streaming=streamed,
        quest={tokens: logprobs_under(quest(tokens, dense_prompts=False)) for tokens in size.sizes},
        window=logprobs_under(streaming(size.fixed, 0)),
        more_sinks=logprobs_under(streaming(size.fixed, 2 * SINKS)),
        recomputed=anew[:, 0],
        of_recomputed=streamed[size.fixed].reshape(-1)[places],
    )


def perplexity(logprobs: np.ndarray) -> float:
    return math.exp(-logprobs.mean())


def over(above: np.ndarray, below: np.ndarray) -> Interval:
    """The interval of perplexity over perplexity. Each window of the text gives a ratio."""
    return interval([math.exp(b.mean() - a.mean()) for a, b in zip(above, below, strict=True)])


# --- pass keys ------------------------------------------------------------------------------------


def pass_key(encode: Any, tokens: int, draw: random.Random) -> tuple[list[int], str]:
    """A prompt of `tokens` tokens with a key at a random depth, and the key."""
    key = str(draw.randint(10000, 99999))
    head = list(encode(HEAD))
    needle = list(encode(NEEDLE.format(key)))
    tail = list(encode(TAIL))
    filler = list(encode(FILLER))
    room = tokens - len(head) - len(needle) - len(tail)
    body = (filler * (room // len(filler) + 1))[:room]
    depth = draw.randint(0, room)
    return head + body[:depth] + needle + body[depth:] + tail, key


def found_keys(model: LoadedModel, size: Size, options: Mapping[str, Any]) -> float:
    """Per cent of the keys that an engine repeats."""
    draw = random.Random(0)
    encode = model.tokenizer.encode
    drawn = [pass_key(encode, size.hidden, draw) for _ in range(size.keys)]
    llm = engine(model, size.hidden + 16, min(size.keys, 5), **options)
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs = llm.generate([prompt for prompt, _ in drawn], params, use_tqdm=False)
    repeated = [key in out.outputs[0].text for out, (_, key) in zip(outputs, drawn, strict=True)]
    return 100 * sum(repeated) / size.keys


def keys(model: LoadedModel, size: Size) -> dict[str, float]:
    """Per cent of the pass keys that are found, by policy."""
    shares = {"full": found_keys(model, size, {})}
    for tokens in size.budgets:
        shares[f"quest, {tokens}"] = found_keys(model, size, quest(tokens, dense_prompts=True))
        shares[f"streaming, {tokens}"] = found_keys(model, size, streaming(tokens))
    return shares


# --- bytes ----------------------------------------------------------------------------------------


def bytes_read(context: int, tokens: int) -> float:
    """Bytes of keys and values that full attention reads, over those that a selection of `tokens`
    tokens reads, its bounds included.
    """
    sizes: dict[str, Any] = {
        "layers": 1,
        "block_size": PAGE,
        "kv_heads": 1,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    block = cache.block_bytes(**sizes) - cache.TOKEN_BYTES * PAGE
    bounds = cache.block_bytes(**sizes, dense_layers=0) - cache.block_bytes(**sizes)
    return context * block / (context * bounds + tokens * block)


# --- findings -------------------------------------------------------------------------------------


@compilations.disk_cache()
def run(folder: Path, quick: bool) -> Findings:
    size = QUICK if quick else FULL
    model = load_model(DEFAULT_MODEL)
    read = texts(model, size)
    hidden = keys(model, size)
    times = timed.times(model.model, size)
    return Findings(
        claims(read, hidden, times, size),
        answers(read, hidden, times, size),
        {"perplexity.svg": figure(read, size)},
        [perplexities(read, size), key_table(hidden, size), time_table(times, size)],
    )


def claims(
    read: Texts, hidden: Mapping[str, float], times: Mapping[int, Times], size: Size
) -> list[Claim]:
    streamed = read.streaming[size.fixed]
    tokens = size.budgets[0]
    longest = size.contexts[-1]
    alike = math.exp(float(read.recomputed.mean() - read.of_recomputed.mean()))
    tokens_read = f"{size.fixed} of {size.length} tokens"
    share = f"{tokens} of {size.hidden} tokens"
    return [
        Claim(
            STREAMING.format("tables 1 and 2"),
            f"perplexity of a window alone, over that of {SINKS} sinks and a window: {tokens_read}",
            (17.90 / 12.12, 5158.07 / 5.40),
            over(read.window, streamed),
            1.1,
            "x",
            WHY_MODEL,
        ),
        Claim(
            STREAMING.format("table 2"),
            f"perplexity of {2 * SINKS} sinks, over that of {SINKS}: {tokens_read}",
            (12.02 / 12.09, 1.0),
            over(read.more_sinks, streamed),
            1.02,
            "x",
            WHY_MODEL,
        ),
        Claim(
            STREAMING.format("table 1"),
            f"perplexity of {SINKS} sinks and a window, over that of a window computed anew: "
            f"{tokens_read}",
            5.40 / 5.43,
            exactly(alike),
            1.05,
            "x",
            WHY_RECOMPUTED,
        ),
        Claim(
            QUEST.format("table 1"),
            f"pass keys found, {share}",
            100.0,
            exactly(hidden[f"quest, {tokens}"]),
            1.1,
            "%",
            WHY_KEYS,
        ),
        Claim(
            QUEST.format("table 1"),
            f"pass keys that StreamingLLM finds, {share}",
            (0.0, 5.0),
            exactly(hidden[f"streaming, {tokens}"]),
            1.1,
            "%",
            WHY_MODEL,
        ),
        Claim(
            QUEST.format("section 3.4"),
            "bytes of keys and values, over those of 4K of 64K tokens in blocks of 16",
            8.0,
            exactly(bytes_read(65536, 4096)),
            1.01,
            "x",
        ),
        Claim(
            QUEST.format("section 4.3"),
            f"time of self-attention, over that of {size.read:,} of {longest:,} tokens",
            7.03,
            span(times[longest].ratios),
            1.25,
            "x",
            WHY_TIME,
        ),
    ]


def answers(
    read: Texts, hidden: Mapping[str, float], times: Mapping[int, Times], size: Size
) -> list[str]:
    full = perplexity(read.full)
    fixed = size.fixed
    longest = size.contexts[-1]

    def increase(logprobs: np.ndarray) -> str:
        return f"{100 * (perplexity(logprobs) / full - 1):.1f} %"

    alone = rounded(perplexity(read.window) / full)
    key_shares = ", ".join(f"{name}: {share:.0f} %" for name, share in hidden.items())
    return [
        f"A query that reads {fixed} of up to {size.length:,} tokens of Python's documentation "
        f"costs {increase(read.quest[fixed])} of perplexity if they are the best blocks (quest), "
        f"and {increase(read.streaming[fixed])} if they are the first {SINKS} and the last ones "
        f"(streaming). Without the first ones, perplexity is {alone} times as high as with all "
        "tokens.",
        f"Pass keys in {size.hidden:,} tokens that are found: {key_shares}. The first digit comes "
        "from the prompt's last query, which reads everything under quest.",
        f"Attention to {longest:,} tokens takes {times[longest].middle:.2f} times as long as "
        f"quest's to {size.read:,} of them, scores included ({times[longest].impl}, batch of "
        f"{size.batch}). Streaming gives blocks back, and quest keeps all.",
    ]


def perplexities(read: Texts, size: Size) -> str:
    def cells(name: str, tokens: Any, values: np.ndarray) -> tuple[Any, ...]:
        ratio = over(values, read.full)
        return (
            name,
            tokens,
            f"{perplexity(values):.2f}",
            f"{ratio.middle:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
        )

    rows = [cells("full", size.length, read.full)]
    rows += [cells("quest", tokens, values) for tokens, values in read.quest.items()]
    rows += [
        cells(f"streaming, {SINKS} sinks", tokens, values)
        for tokens, values in read.streaming.items()
    ]
    rows += [cells(f"streaming, {2 * SINKS} sinks", size.fixed, read.more_sinks)]
    rows += [cells("window alone", size.fixed, read.window)]
    return markdown(("policy", "tokens read at most", "perplexity", "over that of full"), rows)


def key_table(hidden: Mapping[str, float], size: Size) -> str:
    return markdown(("policy, tokens read", f"keys found of {size.keys}, %"), [*hidden.items()])


def time_table(times: Mapping[int, Times], size: Size) -> str:
    rows = [
        (
            f"{context:,}",
            1e3 * measured.full,
            1e3 * measured.selected,
            f"{measured.middle:.2f}",
        )
        for context, measured in times.items()
    ]
    return markdown(
        ("context", "full, ms a layer", f"{size.read:,} selected tokens, ms", "times as long"), rows
    )


def figure(read: Texts, size: Size) -> str:
    lines = {
        "quest": [(tokens, perplexity(values)) for tokens, values in read.quest.items()],
        "streaming": [(tokens, perplexity(values)) for tokens, values in read.streaming.items()],
        "full": [(tokens, perplexity(read.full)) for tokens in (size.sizes[0], size.sizes[-1])],
    }
    return figures.curves(
        {"": lines}, "tokens that a query reads at most", "perplexity", log_x=2, dashed=("full",)
    )
