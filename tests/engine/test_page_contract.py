"""Models of all kinds of pages in engines (page_kinds.py): tokens do not depend on how pages are
cut, shared, copied, moved, given back or found again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import chex
import numpy as np
import pytest

from experiments.training import train_draft
from pagedjax import BeamSearchParams
from pagedjax.device.draft_model import of_decoder
from pagedjax.device.models.eagle import eagle_config
from pagedjax.engine import state as engine_state
from pagedjax.weights.draft_model import write_eagle
from tests.device.test_llama import chosen
from tests.engine.page_kinds import (
    ENGINES,
    KINDS,
    PARAMS,
    SWAPPED,
    Subject,
    branches_of,
    check_moves,
    check_same,
    check_scores,
    prompts,
    tokens_of,
)
from tests.engine.runs import answers, greedy, logprobs_of, small_llm
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

BEAMS = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
# the quick comparison with a plain engine: the slow runs have those of other kinds
QUICK = ("latents", "swapped")

of_all_kinds = pytest.mark.parametrize("subject", KINDS, indirect=True)


@pytest.fixture(scope="module")
def subjects(tiny) -> dict[str, Subject]:
    return {name: Subject(name, tiny) for name in KINDS}


@pytest.fixture
def subject(request, subjects) -> Subject:
    return subjects[request.param]


# tokens -------------------------------------------------------------------------------------------


@pytest.mark.default_cases("heads", "latents")  # test_mixer_layers.py has mixers
@of_all_kinds
def test_tokens_of_a_request_do_not_depend_on_its_company(subject, tmp_path):
    """Together they are cut, swapped and copied; alone they find what is in the cache."""
    llm = small_llm(subject.loaded, **SWAPPED)
    llm.engine.record(tmp_path / "run.jsonl")
    together = tokens_of(llm)
    llm.engine.record(None)
    check_moves(tmp_path / "run.jsonl")
    alone = [llm.generate([prompt], PARAMS)[0] for prompt in prompts()]
    assert alone[-1].num_cached_tokens == 12  # three blocks that all prompts share
    check_same(branches_of(alone), together)


def engines_of_kinds() -> list[Any]:
    """Each kind with each of its engines."""
    cases = []
    for name, kind in KINDS.items():
        for engine in (*kind.slow, *kind.exhaustive):
            run = pytest.mark.slow if engine in kind.slow else pytest.mark.exhaustive
            marks = () if (name, engine) == QUICK else run
            cases.append(pytest.param(name, engine, marks=marks, id=f"{name}, {engine}"))
    return cases


@pytest.mark.parametrize(("subject", "engine"), engines_of_kinds(), indirect=["subject"])
def test_tokens_do_not_depend_on_how_pages_are_kept(
    subject, engine, tiny_folder, tmp_path, on_a_tpu
):
    options = ENGINES[engine]
    if engine == "a draft model":  # of attention alone
        drafter = {"method": "draft", "model": str(tiny_folder), "num_tokens": 3}
        options = options | {"speculative": drafter}
    if engine == "a draft head":
        head = draft_head(tmp_path / "head", subject)
        drafter = {"method": "eagle", "model": str(head), "num_tokens": 3}
        options = options | {"speculative": drafter}
    llm = small_llm(subject.loaded, **options)
    check_same(tokens_of(llm, rounds=2), subject.expected * 2)


@pytest.mark.slow_cases("heads", "mixers")  # they give blocks back, and keep states
@of_all_kinds
def test_tokens_do_not_depend_on_spans(subject):
    """Ends within a span, and a state that must not be written behind an end: a second round finds
    what the first one left in the cache.
    """
    params = replace(PARAMS, logprobs=None)
    spans = {"decode_span": 4, "lookahead": 1, "token_buckets": (8, 64), "block_size": 4}
    llm = small_llm(subject.loaded, **spans)
    expected = [tokens for tokens, _ in subject.expected]
    with mock.patch.object(engine_state, "send", wraps=engine_state.send) as send:
        for _ in range(2):
            outputs = llm.generate(prompts(), params)
            assert [branch.token_ids for output in outputs for branch in output.outputs] == expected
    runs = [call.args[3] for call in send.call_args_list]
    assert sum(len(run) > 1 for run in runs) > 2, "there was no span"


def draft_head(folder: Path, subject: Subject) -> Path:
    """A random head for the model, with half of its vocabulary."""
    model = subject.loaded.model
    ids = np.arange(0, 320, 2)
    params = train_draft.initial(model, ids, 1)[1]
    return write_eagle(folder, model.config, ids.tolist(), params)


@pytest.mark.default_cases("latents")
@of_all_kinds
def test_a_prefix_is_found_at_every_boundary(subject):
    """A prompt of 20 tokens, in blocks of 4, of which another one has the first n."""
    # states fill the pool of the other tests, so that a shared block would give way
    pool = SWAPPED | ({"num_blocks": 64} if subject.kind is KINDS["mixers"] else {})
    llm = small_llm(subject.loaded, **pool)
    rng = np.random.default_rng(5)
    first = rng.integers(3, 320, 20).tolist()
    params = greedy(2, logprobs=0)
    llm.generate([first], params)
    for shared in reversed(range(1, 20)):  # blocks that are no longer asked for give way
        prompt = first[:shared] + rng.integers(3, 320, 3).tolist()
        (output,) = llm.generate([prompt], params)
        assert output.num_cached_tokens == shared // 4 * 4
        (plain_answer,) = answers(subject.plain, [prompt], params)
        assert output.outputs[0].token_ids == plain_answer.token_ids
        logprobs = [logprobs_of(answer) for answer in (output.outputs[0], plain_answer)]
        chex.assert_trees_all_close(*logprobs, atol=1e-3)


@pytest.mark.slow_cases("heads", "mixers")
@of_all_kinds
def test_a_beam_search_has_the_same_beams_in_any_blocks(subject):
    searches = []
    for sizes in ({"block_size": 16}, {"block_size": 4, "max_num_batched_tokens": 11}):
        outputs = small_llm(subject.loaded, **sizes).beam_search(prompts(), BEAMS)
        searches.append([[beam.tokens for beam in output.sequences] for output in outputs])
    assert searches[0] == searches[1]


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["heads", "latents"], indirect=True)  # of mixers: their tests
def test_scores_of_whole_texts_are_those_of_an_engine(subject):
    check_scores(subject.loaded.model, subject.plain, prompts())


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject", [name for name, kind in KINDS.items() if kind.bytes_in_8_bits], indirect=True
)
def test_bits_of_8_take_a_quarter(subject):
    options = {"block_size": 16, "max_num_batched_tokens": 128}
    llm = small_llm(subject.loaded, kv_cache_dtype="float8_e4m3fn", **options)
    assert llm.engine.memory.block_bytes == subject.kind.bytes_in_8_bits
    params = greedy(1, logprobs=0, prompt_logprobs=0)
    outputs = zip(*(x.generate(prompts(), params) for x in (llm, subject.plain)), strict=True)
    for prompt, pair in zip(prompts(), outputs, strict=True):
        in_8_bits, plain = (
            chosen(prompt[1:], (output.prompt_logprobs or ())[1:]) for output in pair
        )
        assert 0 < np.abs(in_8_bits - plain).mean() < 0.2


# refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "name"),
    [(kind, name) for kind in KINDS for name in KINDS[kind].refused],
    indirect=["subject"],
)
def test_what_such_a_model_cannot_have_is_refused(subject, name):
    options, text = subject.kind.refused[name]
    with refused(text):
        small_llm(subject.loaded, **options)


@pytest.mark.parametrize(
    "subject", [name for name, kind in KINDS.items() if kind.refused_drafter], indirect=True
)
def test_drafters_that_do_not_go_with_such_layers_are_refused(subject):
    draft_model, draft_head = subject.kind.refused_drafter
    with refused(draft_model):
        of_decoder(subject.loaded.model)
    with refused(draft_head):
        eagle_config(subject.loaded.model.config, 100)
