"""The replay of texts that come one after the other, against the scheduler's own transitions."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.simulation.checkpoint_replay import (
    CacheSizes,
    CheckpointCache,
    Content,
    Text,
    keys_of,
)
from pagedjax.host import scheduler
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Request, SchedulerConfig
from pagedjax.options.config import PrefixCheckpoints
from tests.drawn import examples

SIZE = 2  # tokens of a block
POLICIES = (
    None,
    PrefixCheckpoints(interval=4),
    PrefixCheckpoints(interval=6, junctions=True),
    PrefixCheckpoints(prompts=True),
    PrefixCheckpoints(texts=True),
    PrefixCheckpoints(prompts=True, texts=True),
    PrefixCheckpoints(junctions=True, texts=True),
)


def by_scheduler(
    texts: list[Text], sizes: CacheSizes, policy: PrefixCheckpoints | None
) -> tuple[list[int], list[Content]]:
    """What each prompt finds, and the content of the cache after each text."""
    states = sizes.states
    config = SchedulerConfig(
        SIZE,
        sizes.num_blocks,
        sizes.chunk,
        1,
        max_model_len=64,
        views=(ALL,) + (View(2),) * states if states else (),
        shares_filling=False,
        prefix_checkpoints=policy if states else None,
    )
    state = scheduler.init(config)
    served = []
    contents = []
    for number, text in enumerate(texts):
        name = str(number)
        names = [f"k{key}" for key in text.keys]
        request = Request(
            name, text.prompt, text.output, hashes=tuple(names[: text.prompt // SIZE])
        )
        state = scheduler.submit(state, request)
        while state.ids:
            state, plan = scheduler.schedule(state, FCFS)
            served += plan.cached
            end = (plan.starts[0] + plan.counts[0]) // SIZE
            new = names[len(plan.seqs[0].hashes) : end]
            state, _ = scheduler.commit(state, plan, [0], {name: tuple(new)} if new else {})
            scheduler.check(state)
        of_states = sum("." in key for key in state.pool.contents)
        contents.append(Content(len(state.pool.contents) - of_states, of_states))
    return served, contents


@st.composite
def loads(draw) -> list[Text]:
    """Texts that begin with parts of earlier ones."""
    key_by_block: dict = {}
    texts: list[Text] = []
    all_pieces: list[list[tuple[str, int, int]]] = []
    for number in range(draw(st.integers(2, 12))):
        pieces: list[tuple[str, int, int]] = []
        if all_pieces and draw(st.integers(0, 3)):
            earlier = draw(st.sampled_from(all_pieces))
            pieces = earlier[: draw(st.integers(1, len(earlier)))]
        prompt = draw(st.integers(1, 12))
        output = draw(st.integers(1, 6))
        pieces = [*pieces, (f"p{number}", 0, prompt), (f"a{number}", 0, output)]
        lengths = list(accumulate(end - start for _, start, end in pieces))
        if lengths[-1] > 40:
            continue
        all_pieces.append(pieces)
        texts.append(Text(keys_of(pieces, SIZE, key_by_block), lengths[-2], output))
    return texts


@examples(60, 1000)
def test_a_replay_is_that_of_the_scheduler(number):
    @settings(max_examples=number)
    @given(
        loads(),
        st.sampled_from(POLICIES),
        st.integers(0, 3),
        st.integers(0, 60),
        st.sampled_from((1, 3, 4, 7, 40)),
    )
    def check(texts, policy, states, spare, chunk):
        num_blocks = 20 + 3 * states + spare  # the longest text alone fits
        sizes = CacheSizes(SIZE, num_blocks, states, chunk)
        cache = CheckpointCache(sizes, policy if states else None)
        served = []
        contents = []
        for text in texts:
            served.append(cache.serve(text))
            contents.append(cache.content)
        hit_tokens = [prompt.hit_tokens for prompt in served]
        assert (hit_tokens, contents) == by_scheduler(texts, sizes, policy)
        assert all(prompt.hit_tokens <= prompt.present_tokens for prompt in served)
        assert states or all(prompt.hit_tokens == prompt.present_tokens for prompt in served)

    check()


def test_keys_are_equal_for_equal_beginnings_alone():
    key_by_block: dict = {}
    first = keys_of([("a", 0, 5), ("b", 0, 4)], 3, key_by_block)
    assert first == (0, 1, 2)
    assert keys_of([("a", 0, 5), ("b", 0, 2), ("c", 0, 9)], 3, key_by_block) == (0, 1, 3, 4, 5)
    assert keys_of([("x", 0, 3), ("a", 3, 5), ("b", 0, 4)], 3, key_by_block)[0] == 6
    assert keys_of([("a", 0, 2)], 3, key_by_block) == ()
    # a key stands for what is before its block, too
    assert keys_of([("y", 0, 3), ("a", 0, 3)], 3, key_by_block) == (9, 10)


def test_a_text_that_does_not_fit_is_refused():
    cache = CheckpointCache(CacheSizes(SIZE, 7, 1, 4), None)
    with pytest.raises(ValueError, match=r"a text of 12 \+ 4 tokens .* the 7 blocks of the pool"):
        cache.serve(Text(range(7), 12, 4))
