"""pack: a plan laid out as padded arrays, by hand-made examples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.device.batch import MAX_LISTED, Batch, Shapes, blank_sampling, token_buckets
from pagedjax.engine.pack import pack
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import Plan, Request, Seq
from pagedjax.params import SamplingParams

SHAPES = Shapes(tokens=(4, 8, 16), max_seqs=3, block_size=4, table_width=5, max_model_len=20, vocab_size=50)
GREEDY = SamplingParams(temperature=0)


def source(tokens: list[int], prompt_len: int, params: SamplingParams = GREEDY, **more) -> SequenceData:
    """A request whose known tokens are `tokens`, with room for 20."""
    room = np.full(20, 77, np.int32)  # what lies behind the known tokens must never be used
    room[: len(tokens)] = tokens
    return SequenceData(params, more.pop("seed", 0), prompt_len, room, len(tokens), **more)


def plan(*rows: tuple[str, SequenceData, int, int, tuple[int, ...]]) -> tuple[Plan, dict[str, SequenceData]]:
    """Rows of (id, source, start, count, blocks)."""
    seqs = tuple(
        Seq(Request(name, s.prompt_len, 5), i, 20, s.length, start, blocks)
        for i, (name, s, start, _, blocks) in enumerate(rows)
    )
    lengths, starts = tuple(s.length for _, s, *_ in rows), tuple(row[2] for row in rows)
    counts = tuple(row[3] for row in rows)
    return Plan(0, seqs, lengths, starts, counts, *[()] * 9, 0, 0, 9), {name: s for name, s, *_ in rows}


def packed(*rows, shapes: Shapes = SHAPES) -> Batch:
    the_plan, sources = plan(*rows)
    return pack(the_plan, sources, shapes, {t: blank_sampling(shapes, t) for t in shapes.tokens})


def equal(array: np.ndarray, *expected) -> None:
    assert array.tolist() == list(expected)


MIXED = (
    ("decode", source([10, 11, 12, 13, 14, 15], 4), 5, 1, (7, 3)),
    ("chunk", source([20, 21, 22, 23, 24, 25, 26], 7), 2, 3, (1, 9)),  # stops before the end of its prompt
    ("whole", source([30, 31], 2), 0, 2, (5,)),
)


def test_a_decode_a_chunk_and_a_whole_prompt_in_one_bucket():
    batch = packed(*MIXED)
    equal(batch.tokens, 15, 22, 23, 24, 30, 31, 0, 0)
    equal(batch.positions, 5, 2, 3, 4, 0, 1, 0, 0)
    equal(batch.slots, 3 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 9 * 4, 5 * 4, 5 * 4 + 1, 0, 0)
    equal(batch.block_tables, [7, 3, 0, 0, 0], [1, 9, 0, 0, 0], [5, 0, 0, 0, 0])
    equal(batch.seq_lens, 6, 5, 2)
    equal(batch.cu_q_lens, 0, 1, 4, 6)
    equal(batch.last, 0, 3, 5)
    equal(batch.targets, *[-1] * 8)
    assert batch.feed is None
    assert all(a.dtype == np.int32 for a in batch[:8])


def test_padding_rows_have_no_tokens_and_padding_tokens_write_to_the_trash_block():
    batch = packed(MIXED[0])
    equal(batch.tokens, 15, 0, 0, 0)
    equal(batch.slots, 13, 0, 0, 0)
    equal(batch.seq_lens, 6, 0, 0)
    equal(batch.cu_q_lens, 0, 1, 1, 1)
    equal(batch.last, 0, 0, 0)
    assert not batch.block_tables[1:].any()
    equal(batch.sampling.num_top, -1, -1, -1)
    equal(batch.sampling.top_p, 1, 1, 1)
    equal(batch.sampling.repetition, 1, 1, 1)


def test_an_empty_plan_is_all_padding():
    batch = packed()
    assert not any(a.any() for a in batch[:7])
    equal(batch.targets, *[-1] * 4)
    equal(batch.cu_q_lens, 0, 0, 0, 0)


def test_the_bucket_is_the_smallest_that_holds_the_tokens():
    assert [SHAPES.bucket(n) for n in (0, 1, 4, 5, 8, 9, 16)] == [4, 4, 4, 8, 8, 16, 16]
    assert [len(packed(("a", source([1] * 16, 16), 0, n, (1, 2, 3, 4))).tokens) for n in (4, 5, 16)] == [4, 8, 16]
    assert [SHAPES.rows(t) for t in (1, 2, 3, 16)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("budget", "smallest", "sizes"),
    [
        (1, 1, (1,)),
        (2, 1, (1, 2)),
        (8, 1, (1, 2, 4, 8)),
        (9, 1, (1, 2, 4, 8, 9)),
        (8, 2, (2, 4, 8)),
        (2, 2, (2,)),
        (1, 2, (2,)),
    ],
)
def test_buckets_are_powers_of_two_and_the_budget(budget, smallest, sizes):
    assert token_buckets(budget, smallest=smallest) == sizes


def test_how_a_row_samples_travels_with_it():
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logprobs=3,
    )
    mine = source([1, 2, 3, 4], 2, params, seed=2**32 - 1)
    s = packed(MIXED[0], ("mine", mine, 3, 1, (2,))).sampling
    equal(s.temperature, 0, 0.5, 0)
    np.testing.assert_array_equal(s.top_p, np.array([1, 0.9, 1], np.float32))
    np.testing.assert_array_equal(s.min_p, np.array([0, 0.1, 0], np.float32))
    equal(s.presence, 0, 1.5, 0)
    equal(s.frequency, 0, -0.5, 0)
    equal(s.repetition, 1, 1.25, 1)
    equal(s.top_k, 0, 7, 0)
    equal(s.num_top, -1, 3, -1)
    equal(s.seed, 0, 2**32 - 1, 0)
    equal(s.position, 2, 2, 0)  # two tokens are out: the next one is the third
    equal(s.prompt_len, 4, 2, 0)
    assert [a.dtype.name for a in s] == [*["float32"] * 6, *["int32"] * 2, "uint32", *["int32"] * 3, "float32", "bool"]


def test_top_k_off_has_one_spelling():
    for off in (0, -1):
        assert packed(("a", source([1], 1, SamplingParams(top_k=off)), 0, 1, (1,))).sampling.top_k[0] == 0


def test_features_that_no_row_uses_take_the_blank_arrays_as_they_are():
    blanks = {t: blank_sampling(SHAPES, t) for t in SHAPES.tokens}
    the_plan, sources = plan(*MIXED)
    s = pack(the_plan, sources, SHAPES, blanks).sampling
    for name in ("listed", "bias", "only_listed"):
        assert getattr(s, name) is getattr(blanks[8], name)
    assert (blanks[8].listed == -1).all()


def listed(row: int, batch: Batch) -> dict[int, float]:
    s = batch.sampling
    entries = [(t, b) for t, b in zip(s.listed[row].tolist(), s.bias[row].tolist(), strict=True) if t >= 0]
    assert len(entries) == len(dict(entries)), "a token is listed twice: its bias would be added twice"
    return dict(entries)


def test_biases_allowed_tokens_and_suppressed_stops_share_one_list():
    def row(name, **params):
        return name, source([1, 2, 3], 2, SamplingParams(max_tokens=9, **params), stop_ids=(8, 9)), 2, 1, (1,)

    batch = packed(
        row("bias", logit_bias={4: 1.5, 9: -2.0}),
        row("allowed", allowed_token_ids=(4, 5, 5), logit_bias={5: 0.5, 6: 3.0}),
        row("early", min_tokens=2, logit_bias={9: 7.0, 3: 1.0}),
    )
    assert listed(0, batch) == {4: 1.5, 9: -2.0}
    assert listed(1, batch) == {4: 0.0, 5: 0.5}
    assert listed(2, batch) == {3: 1.0, 8: -np.inf, 9: -np.inf}
    equal(batch.sampling.only_listed, False, True, False)
    assert batch.sampling.listed.shape == (3, MAX_LISTED)


@pytest.mark.parametrize(("outputs", "suppressed"), [(0, (8, 9)), (1, (8, 9)), (2, ()), (3, ())])
def test_stop_tokens_are_suppressed_until_min_tokens_are_out(outputs, suppressed):
    params = SamplingParams(min_tokens=2, max_tokens=9)
    assert source([1] * (3 + outputs), 3, params, stop_ids=(8, 9)).suppressed == suppressed


def test_prompt_tokens_are_targets_of_the_tokens_before_them():
    params = SamplingParams(prompt_logprobs=0)
    prompt = [20, 21, 22, 23, 24, 25, 26]
    decode = ("decode", source([1, 2, 3], 2, params), 2, 1, (2,))
    first = packed(decode, ("a", source(prompt, 7, params), 0, 3, (1, 9)))
    equal(first.targets, -1, 21, 22, 23)
    middle = packed(decode, ("a", source(prompt, 7, params), 3, 2, (1, 9)))
    equal(middle.targets, -1, 24, 25, -1)
    last = packed(("a", source(prompt, 7, params), 5, 2, (1, 9)))
    equal(last.targets, 26, -1, -1, -1)  # nothing follows the last prompt token but what is sampled
    after_preemption = packed(("a", source([*prompt, 40, 41], 7, params), 4, 5, (1, 9, 3)))
    equal(after_preemption.targets, 25, 26, *[-1] * 6)


@given(data=st.data())
def test_any_plan_lays_every_token_where_its_block_table_says(data):
    shapes = SHAPES._replace(tokens=(1, 2, 4, 8, 16, 60), max_seqs=5)
    ids = iter(data.draw(st.permutations(range(1, 40))))
    rows, total = [], 0
    for number in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 20))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, min(length - start, 12)))
        table = tuple(next(ids) for _ in range(-(-length // 4)))
        tokens = [100 * number + i for i in range(length)]
        rows.append((f"{number}", source(tokens, length), start, count, table))
        total += count
    batch = packed(*rows, shapes=shapes)
    t = shapes.bucket(total)
    shapes_of_t = [(t,), (t,), (t,), (min(t, 5), 5), (min(t, 5),), (min(t, 5) + 1,), (min(t, 5),), (t,)]
    assert [a.shape for a in batch[:8]] == shapes_of_t
    at = 0
    for row, (_, s, start, count, table) in enumerate(rows):
        assert batch.cu_q_lens[row] == at
        assert batch.seq_lens[row] == start + count
        assert batch.last[row] == at + count - 1
        for position in range(start, start + count):
            assert batch.tokens[at] == s.tokens[position]
            assert batch.positions[at] == position
            assert batch.slots[at] == table[position // 4] * 4 + position % 4
            at += 1
    assert (batch.cu_q_lens[len(rows) :] == at).all()
    assert not batch.slots[at:].any()
