"""The engine on SmolLM2 against tests/goldens/greedy.json, which transformers made on torch (see
make_greedy.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.host.types import Preempted
from tests.engine.poison import poisoned

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "greedy.json").read_text())["prompts"]
SHORT = [g for g in GOLDENS if len(g["prompt_token_ids"]) <= 100]
SLOW = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
# The sampled request of the issue, among and apart from others.
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16, ignore_eos=True)


def engine(model, **config) -> LLM:
    """Few buckets, because each costs seconds to compile: single tokens, and full steps."""
    config.setdefault(
        "token_buckets", tuple(sorted({min(32, config["max_num_batched_tokens"]), *_full(config)}))
    )
    return LLM(model, progress=False, max_model_len=512, **config)


def _full(config) -> tuple[int, ...]:
    budget = config["max_num_batched_tokens"]
    return (64, budget) if budget > 64 else (budget,)


def differing(llm: LLM, goldens, tokens: int = 64) -> list[str]:
    """Names of the prompts whose continuation is another than transformers'."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([g["prompt_token_ids"] for g in goldens], params, use_tqdm=False)
    pairs = zip(outputs, goldens, strict=True)
    return [
        g["name"] for out, g in pairs if list(out.outputs[0].token_ids) != g["token_ids"][:tokens]
    ]


def preemptions(llm: LLM, prompts, params) -> tuple[int, dict[str, list[int]]]:
    """Run prompts on the engine itself -> (preemptions, tokens by prompt index)."""
    count, tokens = 0, {str(i): [] for i in range(len(prompts))}
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add(str(i), prompt, p)
    while llm.engine.has_work:
        result = llm.engine.step()
        assert result is not None
        count += sum(isinstance(e, Preempted) for e in result.events)
        for event in result.events:
            for request_id, token in (
                zip(*event[1:3], strict=True) if type(event).__name__ == "Sampled" else ()
            ):
                tokens[request_id].append(token)
    return count, tokens


def prompt_log_probabilities(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_token_ids is not None
    places = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places if place is not None]


# By default one program for all: chunks of at most 32 tokens cut the longest prompt into several.
NARROW = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 32, "token_buckets": (32,)}
WIDE = {"block_size": 16, "max_num_batched_tokens": 2048, "token_buckets": (32, 2048)}
WITH_PROMPTS = [golden for golden in GOLDENS if "prompt_logprobs" in golden]
SOME = [*WITH_PROMPTS, *(golden for golden in SHORT[::3] if golden not in WITH_PROMPTS)]


@pytest.mark.parametrize(
    ("options", "goldens", "tokens"),
    [
        (NARROW, SOME, 8),
        pytest.param(NARROW, SHORT, 12, marks=SLOW),
        pytest.param(WIDE, GOLDENS, 64, marks=SLOW),
    ],
    ids=["some", "short", "all"],
)
def test_tokens_and_log_probabilities_equal_transformers(smollm2, options, goldens, tokens):
    llm = engine(smollm2, **options)
    params = [
        replace(GREEDY, max_tokens=tokens, prompt_logprobs=0 if golden in WITH_PROMPTS else None)
        for golden in goldens
    ]
    outputs = llm.generate(
        [golden["prompt_token_ids"] for golden in goldens], params, use_tqdm=False
    )
    for output, golden in zip(outputs, goldens, strict=True):
        wanted = golden["token_ids"][:tokens]
        (completion,) = output.outputs
        assert list(completion.token_ids) == wanted, golden["name"]
        assert completion.text == llm.tokenizer.decode(wanted), golden["name"]
        values = [
            place[token].logprob for token, place in zip(wanted, completion.logprobs, strict=True)
        ]
        assert values == pytest.approx(golden["logprobs"][:tokens], abs=1e-3), golden["name"]
        if golden in WITH_PROMPTS:
            expected = [value for value in golden["prompt_logprobs"] if value is not None]
            assert prompt_log_probabilities(output) == pytest.approx(expected, abs=1e-3), golden[
                "name"
            ]


@pytest.mark.exhaustive  # test_swapping.py has the same with small models
def test_preemption_changes_no_golden_token(smollm2):
    llm = engine(
        smollm2, block_size=8, max_num_batched_tokens=64, num_blocks=20, token_buckets=(16, 64)
    )
    goldens = SHORT[:8]
    params = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)] * len(goldens)
    count, tokens = preemptions(llm, [g["prompt_token_ids"] for g in goldens], params)
    assert count > 0
    assert all(tokens[str(i)] == g["token_ids"][:32] for i, g in enumerate(goldens))


@pytest.mark.slow
def test_a_seeded_request_is_independent_of_its_batch(smollm2):
    prompt = GOLDENS[0]["prompt_token_ids"]
    others = [g["prompt_token_ids"] for g in SHORT[1:16]]
    wide = engine(smollm2, block_size=16, max_num_batched_tokens=64, token_buckets=(16, 64))
    alone = wide.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0].token_ids
    mates = [SamplingParams(temperature=1.0, seed=i, max_tokens=4 + i) for i in range(len(others))]
    among = wide.generate(
        [*others[:9], prompt, *others[9:]], [*mates[:9], SAMPLED, *mates[9:]], use_tqdm=False
    )
    assert among[9].outputs[0].token_ids == alone
    last = wide.generate([*others[::-1], prompt], [*mates, SAMPLED], use_tqdm=False)
    assert last[-1].outputs[0].token_ids == alone

    narrow = engine(
        smollm2,
        block_size=8,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        num_blocks=10,
        token_buckets=(16,),
    )
    assert narrow.generate([prompt], SAMPLED, use_tqdm=False)[0].outputs[0].token_ids == alone
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3 + [SAMPLED]
    count, tokens = preemptions(narrow, [*others[:3], prompt], params)
    assert count > 0, "the pool was meant to be too small"
    assert tokens["3"] == list(alone)


def eventful(llm: LLM, log: Path) -> tuple[list[str], list[tuple[str, str, tuple[int, ...]]]]:
    """Two streams, one of them given up half-way, beside requests of which every other has a stop
    string, recorded.
    """
    llm.engine.reset()
    llm.engine.record(log)
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    given_up, kept = (llm.stream(g["prompt_token_ids"], greedy) for g in SHORT[:2])
    pieces = [next(stream) for _ in range(4) for stream in (given_up, kept)]
    given_up.close()
    params = [
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop=[" the"] * (i % 2))
        for i in range(8)
    ]
    outputs = llm.generate([g["prompt_token_ids"] for g in SHORT[2:10]], params, use_tqdm=False)
    pieces.append("".join(kept))
    llm.engine.record(None)
    best = [output.outputs[0] for output in outputs]
    return pieces, [(one.finish_reason, one.text, tuple(one.token_ids)) for one in best]


@pytest.mark.exhaustive  # test_lookahead.py has the same with small models
def test_lookahead_leaves_the_same_log(smollm2, tmp_path):
    """With preemption, a cancellation and stop strings in the mix."""
    runs = {}
    for lookahead in (0, 1, 2):
        options = {
            "block_size": 8,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "num_blocks": 20,
        }
        llm = engine(smollm2, **options, lookahead=lookahead, token_buckets=(16, 64))
        log = tmp_path / f"{lookahead}.jsonl"
        runs[lookahead] = eventful(llm, log), log.read_bytes()
    (_, outputs), log = runs[0]
    for what in (b'"Preempted"', b'"abort"', b'"stop"'):
        assert what in log
    reasons = [reason for reason, _, _ in outputs]
    assert reasons[::2] == ["length"] * 4
    assert "stop" in reasons[1::2]
    assert [list(ids) for _, _, ids in outputs[::2]] == [g["token_ids"][:32] for g in SHORT[2:10:2]]
    assert all(other == runs[0] for other in runs.values())


@pytest.mark.exhaustive  # test_prefix_caching.py does it by default
def test_goldens_never_read_freed_blocks(smollm2):
    """Free blocks hold NaN; the pool is so small that every block changes hands, and nothing is
    kept for others.
    """
    llm = engine(
        smollm2,
        block_size=16,
        max_num_batched_tokens=512,
        num_blocks=60,
        enable_prefix_caching=False,
    )
    spoilt = poisoned(llm.engine)
    assert differing(llm, GOLDENS) == []
    assert max(spoilt) == 60
    assert min(spoilt) < 5


# The smallest and the largest. The rest of the grid takes minutes more and is for changes of
# kernels.
SAMPLE_OF_GRID = {(1, 16), (64, 2048)}


@pytest.mark.parametrize(
    ("block_size", "budget"),
    [
        pytest.param(
            size,
            budget,
            marks=pytest.mark.slow if (size, budget) in SAMPLE_OF_GRID else pytest.mark.exhaustive,
        )
        for size in (1, 8, 16, 64)
        for budget in (16, 64, 2048)
    ],
)
def test_block_size_and_budget_change_no_golden_token(smollm2, block_size, budget):
    llm = engine(
        smollm2, block_size=block_size, max_num_batched_tokens=budget, num_blocks=2048 // block_size
    )
    goldens = GOLDENS if budget > 16 else SHORT
    assert differing(llm, goldens) == []
    one_by_one = [name for g in SHORT[:6] for name in differing(llm, [g], tokens=24)]
    assert one_by_one == []
