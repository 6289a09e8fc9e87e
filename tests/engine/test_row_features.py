"""A sampling option of a user: one value in one file, given to an engine, set by a request's
`extra_args`.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.device.row_features import RowFeature

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "token_buckets": (64,), "num_blocks": 256}
PROMPTS = [[5, 6, 7], [9, 10, 11, 12], [20, 21]]

# Adds a number to the logit of one token: enough of it, and the token is always the best.
FAVOUR = RowFeature(
    name="favour",
    stage="logits",
    off={"token": np.int32(0), "bonus": np.float32(0)},
    read=lambda params, stop_ids: dict(
        zip(("token", "bonus"), params.extra_args["favour"], strict=True)
    ),
    apply=lambda x, rows, context: x.at[np.arange(len(x)), rows["token"]].add(rows["bonus"]),
    params=("favour",),
)


@pytest.fixture(scope="module")
def llms(tiny):
    return LLM(tiny, progress=False, **SIZES), LLM(
        tiny, progress=False, row_features=(FAVOUR,), **SIZES
    )


def params(**options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **options)


def tokens(llm, *each) -> list[tuple[int, ...]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, list(each), use_tqdm=False)]


def test_a_request_uses_an_option_and_its_batch_is_unchanged(llms):
    plain, engine = llms
    expected = tokens(plain, params(), params(), params())
    assert tokens(engine, params(), params(), params()) == expected
    found = tokens(engine, params(), params(extra_args={"favour": (77, 1000.0)}), params())
    assert found == [expected[0], (77,) * 4, expected[2]]


def test_an_option_goes_with_the_built_in_ones(llms):
    _, engine = llms
    both = params(
        extra_args={"favour": (77, 1000.0)}, logit_bias={78: 100.0}, frequency_penalty=0.5
    )
    assert tokens(engine, both, params(), params())[0] == (77,) * 4
    forbidden = params(extra_args={"favour": (77, 1000.0)}, allowed_token_ids=(30, 31))
    assert set(tokens(engine, forbidden, params(), params())[0]) <= {30, 31}


def test_an_option_that_the_engine_does_not_have_is_refused(llms):
    plain, engine = llms
    with pytest.raises(
        ValueError, match=r"extra_args has 'favour'; the names that this engine knows are: none"
    ):
        tokens(plain, params(extra_args={"favour": (77, 1.0)}), params(), params())
    with pytest.raises(
        ValueError, match=r"extra_args has 'favor'; the names that this engine knows are: 'favour'"
    ):
        tokens(engine, params(extra_args={"favor": (77, 1.0)}), params(), params())
    assert not plain.engine.has_work
    assert not engine.engine.has_work


def test_two_options_of_one_name_are_refused(tiny):
    with pytest.raises(ValueError, match=r"row_features use the name 'favour' twice"):
        LLM(tiny, progress=False, row_features=(FAVOUR, FAVOUR), **SIZES)
