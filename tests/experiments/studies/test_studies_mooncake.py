"""Study 026: hit rates against a cache by force, and the traces that it reads."""

from __future__ import annotations

import importlib
import json

import pytest
from hypothesis import strategies as st

from experiments import reproduce
from experiments.studies.findings import NoTraces
from tests import drawn

mooncake = importlib.import_module("experiments.studies.026_mooncake.study")


def rate_by_force(prompts: list[list[int]], size: int) -> float:
    """The hit rate of a list of ids, the oldest first, in which a prompt's last id is its oldest."""
    cache: list[int] = []
    hits = 0
    for ids in prompts:
        hits += sum(block in cache for block in ids)
        cache = [block for block in cache if block not in ids] + ids[::-1]
        del cache[: max(0, len(cache) - size)]
    return hits / sum(map(len, prompts))


@st.composite
def prompts_with_prefixes(draw) -> list[list[int]]:
    """Prompts of 1 to 5 blocks. Equal ids have equal ids before them."""
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for words in draw(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)
    ):
        prefixes = [tuple(words[: end + 1]) for end in range(len(words))]
        prompts.append([ids.setdefault(prefix, len(ids)) for prefix in prefixes])
    return prompts


@drawn.given(30, 300, prompts=prompts_with_prefixes(), size=st.integers(5, 20))
def test_hits_are_those_of_a_cache_by_force(prompts, size):
    assert mooncake.hit_rate(prompts, size) == rate_by_force(prompts, size)


def test_a_prompt_that_is_larger_than_the_cache_is_an_error():
    with pytest.raises(ValueError, match="a prompt has 3 blocks, and the pool has 2"):
        mooncake.hit_rate([[0, 1, 2]], 2)


def row(number: int) -> str:
    ids = [0, 1, 2 + number]
    numbers = {"timestamp": 500 * number, "input_length": 1100, "output_length": 1 + number % 3}
    return json.dumps({**numbers, "hash_ids": ids})


@pytest.fixture
def traces(tmp_path):
    """A conversation trace, and one of the technical report: 40 prompts with a common beginning."""
    for name in ("conversation_trace", "mooncake_trace"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(row, range(40))), encoding="utf-8")
    return tmp_path


def test_traces_that_are_there_have_claims(traces):
    rates = {
        name: mooncake.rates_of(name, file, quick=True)
        for name, file in mooncake.trace_files(traces).items()
    }
    assert list(rates) == ["conversation", mooncake.REPORT]
    hit_share = 2 * 39 / 120
    assert set(rates["conversation"].values()) == {hit_share}
    claims = mooncake.rate_claims(mooncake.REPORT, rates[mooncake.REPORT])
    assert [claim.published for claim in claims] == [0.30, 0.40, 0.48, 0.50, 0.51, 0.51]
    assert {claim.ours.middle for claim in claims} == {hit_share}
    rates = [
        claim.ours.middle for claim in mooncake.rate_claims("conversation", rates["conversation"])
    ]
    assert rates == [hit_share, 1.0, hit_share, hit_share]


def test_without_the_conversation_trace_nothing_runs(tmp_path):
    with pytest.raises(NoTraces, match=r"there is no \*conversation\*.jsonl"):
        mooncake.run(reproduce.STUDIES / "026_mooncake", True, tmp_path)


@pytest.mark.slow
def test_lost_requests_are_those_that_were_turned_away_or_late(traces):
    (file,) = traces.glob("conversation*")
    runs = mooncake.losses(reproduce.STUDIES / "026_mooncake", file, quick=True)
    assert set(runs) == {(policy, rate) for policy in mooncake.POLICIES for rate in (0.209, 0.418)}
    for summaries in runs.values():
        for summary in summaries:
            assert summary["requests"] == 30
            assert 0 <= mooncake.rejection_rate(summary) <= mooncake.loss_rate(summary) <= 1
