"""028: how many different answers one greedy prompt has under varying load, and how far the
log-probabilities of a trainer are from those of its sampler. Both are measured with and without
batch invariance, on JAX's device.

The study has no config: its engine serves the requests while others come and go.
The published numbers were copied from notes about the page, not from the page itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.studies.findings import Claim, Findings, exactly, markdown
from pagedjax import LLM, SamplingParams, load_model
from pagedjax.engine import compilations
from pagedjax.engine.session import Branches, GenerationRequest
from pagedjax.models import score
from pagedjax.text.outputs import OutputBuilder
from pagedjax.weights.pretrained import DEFAULT_MODEL

QUESTION = "How many answers has one greedy prompt, and how far is a trainer from its sampler?"
SOURCE = "He 2025, Defeating Nondeterminism in LLM Inference (Thinking Machines)"
DTYPE = "bfloat16"
SEED = 28
COMPANY = 0.25  # other requests that come for each completion
RATES = (0.05, 0.2, 0.6)  # completions that begin in a step, on average; one is drawn for each span
SPAN = 40  # steps with one rate
LONGEST = 160  # prompt tokens of other requests
ENGINE: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 32, 64),
    "max_model_len": 256,
    "num_blocks": 1024,
    "enable_prefix_caching": False,  # with it, all completions read the keys of the first one
}
MODES = {"ordinary": False, "batch-invariant": True}
WHY_ONE = (
    "on a CPU only attention sums in another order, where a prompt is cut into other chunks; that "
    "changed no token of these answers"
)


class Size(NamedTuple):
    """completions: greedy answers to the prompt. prompt: its tokens. output: tokens of each answer.
    rollouts: sampled answers, whose log-probabilities are compared.
    """

    completions: int
    prompt: int
    output: int
    rollouts: int


FULL = Size(completions=1000, prompt=100, output=32, rollouts=32)
QUICK = Size(completions=16, prompt=40, output=8, rollouts=4)


@compilations.disk_cache()
def run(folder: Path, quick: bool) -> Findings:
    size = QUICK if quick else FULL
    model = load_model(DEFAULT_MODEL, dtype=DTYPE)
    module = trained_module()
    answers = {}
    distances = {}
    for mode, invariant in MODES.items():
        llm = LLM(model, progress=False, batch_invariant=invariant, **ENGINE)
        answers[mode] = completions(llm, size)
        distances[mode] = distance(llm, module, size, invariant)
    return Findings(
        claims_of(answers, distances),
        answer(answers, distances),
        tables=[table(answers, distances)],
    )


# --- completions ----------------------------------------------------------------------------------


def prompt_of(llm: LLM, size: Size) -> list[int]:
    """The prompt: the first tokens of a page of Python's documentation."""
    return list(llm.tokenizer.encode(topics["assignment"]))[: size.prompt]


def completions(llm: LLM, size: Size) -> list[tuple[int, ...]]:
    """The greedy completions of the prompt. It is sent again and again at random times, and so are
    other requests.
    """
    rng = np.random.default_rng(SEED)
    session = llm.session
    prompt = prompt_of(llm, size)
    vocabulary = llm.engine.model.config.vocab_size
    greedy = SamplingParams(temperature=0.0, max_tokens=size.output, ignore_eos=True)
    branches: list[Branches] = []
    rate = RATES[0]
    step = 0
    while len(branches) < size.completions or session.branches:
        if step % SPAN == 0:
            rate = rng.choice(RATES)
        missing = size.completions - len(branches)
        requests = [GenerationRequest(prompt, greedy)] * min(missing, rng.poisson(rate))
        for _ in range(rng.poisson(COMPANY * rate) if missing else 0):
            company = rng.integers(vocabulary, size=rng.integers(1, LONGEST)).tolist()
            session.add([GenerationRequest(company, greedy)])
        branches += session.add(requests) if requests else []
        if session.branches:
            session.step()
        step += 1
    return [
        tuple(branch.token_ids)
        for branches_of_request in branches
        for branch in branches_of_request.values()
        if isinstance(branch, OutputBuilder)
    ]


def first_difference(answers: Sequence[tuple[int, ...]]) -> int | None:
    """The first position at which two answers have different tokens; None: all are equal."""
    columns = zip(*answers, strict=True)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), None)


# --- sampler and trainer --------------------------------------------------------------------------


class Distance(NamedTuple):
    """How far a trainer is from its sampler.

    kl: KL(sampler | trainer), in nats a token.
    largest: the largest difference of the two log-probabilities of a token.
    """

    kl: float
    largest: float


def trained_module() -> nnx.Module:
    """The model, with its matrices in the layout of a trainer, which XLA multiplies."""
    loaded = load_model(DEFAULT_MODEL, dtype=DTYPE, linear_impl="xla").model
    return nnx.merge(loaded.graphdef, loaded.params)


def distance(llm: LLM, module: Any, size: Size, invariant: bool) -> Distance:
    """How far the log-probabilities of `score` are from those that the engine sampled with.

    KL is estimated by k3 (Schulman 2020): the mean of exp(d) - 1 - d, which has no bias.
    """
    params = SamplingParams(
        temperature=1.0,
        max_tokens=size.output,
        ignore_eos=True,
        logprobs=0,
        seed=SEED,
        n=size.rollouts,
    )
    output: Any = llm.generate([prompt_of(llm, size)], params, use_tqdm=False)[0]
    sampled = np.array(
        [
            [
                entry[token].logprob
                for token, entry in zip(rollout.token_ids, rollout.logprobs, strict=True)
            ]
            for rollout in output.outputs
        ],
        np.float32,
    )
    tokens = np.array(
        [[*output.prompt_token_ids, *rollout.token_ids] for rollout in output.outputs]
    )

    graphdef, state = nnx.split(module)

    @jax.jit
    def scores(state: nnx.State, tokens: jax.Array) -> jax.Array:
        return score(nnx.merge(graphdef, state), tokens, batch_invariant=invariant)

    trained = np.concatenate([np.asarray(scores(state, row[None])) for row in tokens])
    differences = (trained[:, len(output.prompt_token_ids) :] - sampled).astype(np.float64)
    kl = float(np.mean(np.expm1(differences) - differences))
    return Distance(kl, float(np.abs(differences).max()))


# --- findings -------------------------------------------------------------------------------------

Answers = dict[str, list[tuple[int, ...]]]
Distances = dict[str, Distance]


def claims_of(answers: Answers, distances: Distances) -> list[Claim]:
    counts = {mode: exactly(len(set(texts))) for mode, texts in answers.items()}
    kls = {mode: exactly(distance.kl) for mode, distance in distances.items()}
    number = len(answers["ordinary"])
    return [
        Claim(
            f"{SOURCE}: 80 of 1,000",
            f"different greedy answers of {number:,}, ordinary kernels",
            (2.0, math.inf),
            counts["ordinary"],
            1.0,
            why=WHY_ONE,
        ),
        Claim(
            SOURCE,
            f"different greedy answers of {number:,}, batch-invariant kernels",
            1.0,
            counts["batch-invariant"],
            1.0,
        ),
        Claim(
            f"{SOURCE}: about 0.001",
            "KL of sampler and trainer, ordinary kernels",
            0.001,
            kls["ordinary"],
            10.0,
            "nats a token",
            "another model, whose tokens are less or more certain",
        ),
        Claim(
            SOURCE,
            "KL of sampler and trainer, batch-invariant kernels",
            0.0,
            kls["batch-invariant"],
            1.0,
            "nats a token",
        ),
    ]


def answer(answers: Answers, distances: Distances) -> list[str]:
    sentences = []
    for mode, texts in answers.items():
        (_, commonest), *_ = Counter(texts).most_common(1)
        place = first_difference(texts)
        place_words = "" if place is None else f" (the first difference is at token {place})"
        sentences.append(
            f"With {mode} kernels {len(texts):,} greedy completions of one prompt under varying "
            f"load have {len(set(texts))} text{'s' * (len(set(texts)) > 1)}{place_words}; the "
            f"commonest is that of {commonest:,}."
        )
        distance = distances[mode]
        sentences.append(
            f"A trainer's log-probabilities are {distance.kl:.3g} nats a token away (KL), and at "
            f"most {distance.largest:.3g}."
        )
    return [
        *sentences,
        f"SmolLM2-135M in {DTYPE}, without a prefix cache, which would give all requests the keys "
        "of the first one.",
    ]


def table(answers: Answers, distances: Distances) -> str:
    rows = [
        (
            mode,
            len(texts),
            len(set(texts)),
            Counter(texts).most_common(1)[0][1],
            "none" if first_difference(texts) is None else first_difference(texts),
            distances[mode].kl,
            distances[mode].largest,
        )
        for mode, texts in answers.items()
    ]
    head = (
        "kernels",
        "completions",
        "different",
        "the commonest",
        "first difference at token",
        "KL, nats a token",
        "largest difference of a log-probability",
    )
    return markdown(head, rows)
