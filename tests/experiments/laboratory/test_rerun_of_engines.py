"""A recording of a real engine that runs again with a change is what the engine does when it is run
so: decisions, blocks, preemptions and tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from experiments.laboratory import past, rerun
from experiments.laboratory.rerun import Change, run
from pagedjax import LLM, BeamSearchParams, SamplingParams
from tests import drawn, unchanged
from tests.engine.runs import small_llm
from tests.experiments.laboratory.test_confirm import BUDGET, ENGINES
from tests.experiments.laboratory.test_rerun import with_effect

CHANGES = [
    {"policy": "shortest"},
    {"policy": "priority", "max_num_batched_tokens": 24},
    {"policy": "longest_prefix"},
    {"max_num_batched_tokens": 9},
]


Params = SamplingParams | BeamSearchParams


def requests(
    draw: random.Random, count: int, *, greedy: bool
) -> tuple[list[list[int]], list[Params]]:
    """Prompts that begin alike, with beams, stop tokens and stop strings; and unless they are
    greedy, with seeds and branches.
    """
    prompts: list[list[int]] = []
    params: list[Params] = []
    for _ in range(count):
        family = draw.randrange(3)
        prompts.append([family] * draw.randint(1, 24) + draw.choices(range(250), k=8))
        if draw.random() < 0.2:
            del prompts[-1][16:]  # two beams fit into the pool
            params.append(BeamSearchParams(beam_width=2, max_tokens=draw.randint(1, 8)))
            continue
        params.append(
            SamplingParams(
                temperature=0.0 if greedy else 1.0,
                seed=draw.randrange(1000),
                max_tokens=draw.randint(1, 15),
                n=1 if greedy else draw.choice([1, 1, 3]),
                stop=draw.choice([(), ("a", "e")]),
                stop_token_ids=draw.choice([(), (7, 30, 99)]),
                ignore_eos=draw.random() < 0.5,
            )
        )
    return prompts, params


def record(llm: LLM, path: Path, prompts: list[list[int]], params: list[Params]) -> past.Past:
    """Records a run of an engine."""
    llm.engine.record(path, prompts=True)
    llm.generate(prompts, params)
    llm.engine.record(None)
    return past.read(path)


# Rounding in another batch changes one drawn token in many thousands, unless the engine is invariant.
# That costs a compilation, so the default run is greedy.
@drawn.examples(3, 25)
def test_a_changed_run_is_what_the_engine_does(one_layer, tmp_path: Path, number: int):
    invariant = number > 3
    sizes = {**BUDGET, **ENGINES["small"], "max_model_len": 48, "batch_invariant": invariant}
    expected = tmp_path / "expected.jsonl"
    second_recording = tmp_path / "again.jsonl"
    preemptions = 0

    def holds(seed: int, changes: dict[str, Any]) -> None:
        nonlocal preemptions
        prompts, params = requests(random.Random(seed), 10, greedy=not invariant)
        path = tmp_path / "run.jsonl"
        recorded = record(small_llm(one_layer, **sizes), path, prompts, params)
        rerun.record(second_recording, run(recorded, rerun.unchanged(recorded)))
        assert second_recording.read_text().splitlines() == path.read_text().splitlines()
        changed = small_llm(one_layer, **{**sizes, **changes})
        of_engine = record(changed, expected, prompts, params)
        change = Change(of_engine.config, of_engine.policy)
        repeated_run = run(recorded, change)
        rerun.record(second_recording, repeated_run)
        assert with_effect(second_recording) == with_effect(expected)
        assert not repeated_run.inexact
        preemptions += second_recording.read_text().count('"Preempted"')

    seeds = st.integers(0, 2**32 - 1)
    drawn.check(number, holds, seed=seeds, changes=st.sampled_from(CHANGES))
    assert preemptions > number


# those of which a recording differs in kind: the numbers of a step are not in it
KINDS = (
    "plain",
    "adapters",
    "quest",
    "streaming",
    "window groups",
    "eagle",
    "ngram",
    "lookahead",
    "recomputed",
    "swapped",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    unchanged.write_models(folder)
    return folder


@pytest.mark.slow_cases("adapters", "quest", "window groups", "eagle", "swapped")
@pytest.mark.parametrize("name", KINDS)
def test_without_a_change_recordings_of_all_kinds_of_engines_are_made_again(
    models: Path, tmp_path: Path, name: str
):
    """With swapped blocks, groups of layers, KV policies, adapters, drafters and beams."""
    path = tmp_path / "run.jsonl"
    copy = tmp_path / "copy.jsonl"
    model, options = unchanged.ENGINES[name]
    settings = {**unchanged.SIZES, **options, "compilation": "lazy"}
    speculative = dict(settings.get("speculative", {}))
    if "model" in speculative:
        settings["speculative"] = speculative | {"model": str(models / speculative["model"])}
    llm = LLM(models / model, progress=False, **settings)
    llm.engine.record(path, prompts=True)
    list(unchanged.answers_of(name, llm, models))
    llm.engine.record(None)
    recorded = past.read(path)
    made_again = run(recorded, rerun.unchanged(recorded))
    rerun.record(copy, made_again)
    assert copy.read_text().splitlines() == path.read_text().splitlines()
    assert made_again.follows
    assert not made_again.inexact
