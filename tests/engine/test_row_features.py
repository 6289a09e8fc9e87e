"""A sampling option of a user: one value in one file, given to an engine, set by a request's
`extra_args`.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.device.row_features import RowFeature
from tests.engine.runs import greedy, small_llm, token_ids

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


PLAIN = greedy(4)


def favoured(bonus: float = 1000.0, **options) -> SamplingParams:
    return greedy(4, extra_args={"favour": (77, bonus)}, **options)


@pytest.fixture(scope="module")
def llms(tiny):
    return small_llm(tiny), small_llm(tiny, row_features=(FAVOUR,))


def test_a_request_uses_an_option_and_its_batch_is_unchanged(llms):
    plain, llm = llms
    expected = token_ids(plain, PROMPTS, PLAIN)
    assert token_ids(llm, PROMPTS, PLAIN) == expected
    tokens = token_ids(llm, PROMPTS, [PLAIN, favoured(), PLAIN])
    assert tokens == [expected[0], (77,) * 4, expected[2]]


def test_an_option_goes_with_the_built_in_ones(llms):
    biased = favoured(logit_bias={78: 100.0}, frequency_penalty=0.5)
    forbidden = favoured(allowed_token_ids=(30, 31))
    tokens = token_ids(llms[1], PROMPTS, [biased, forbidden, PLAIN])
    assert tokens[0] == (77,) * 4
    assert set(tokens[1]) <= {30, 31}


def test_an_option_that_the_engine_does_not_have_is_refused(llms):
    plain, _ = llms
    with pytest.raises(
        ValueError, match=r"extra_args has 'favour'; the names that this engine knows are: none"
    ):
        plain.generate(PROMPTS, favoured())
    assert not plain.engine.has_work
