"""`pack`: plans become padded arrays; examples by hand, and any plan."""

from __future__ import annotations

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.device.batch import (
    Batch,
    Shapes,
    blank_sampling,
    gpu_decode_buckets,
    prompt_buckets,
    token_buckets,
)
from pagedjax.device.row_features import RowFeature, chain
from pagedjax.device.row_features.chain import DEFAULT
from pagedjax.device.row_features.listed_tokens import MAX_LISTED
from pagedjax.engine.pack import pack, pack_drafts
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import EMPTY_PLAN, Plan, Request, Seq
from pagedjax.options.params import SamplingParams
from tests.refusals import refused

SHAPES = Shapes(
    tokens=(4, 8, 16), max_seqs=3, block_size=4, table_width=5, max_model_len=20, vocab_size=50
)
GREEDY = SamplingParams(temperature=0)


class KnownData(SequenceData):
    """With the number of its known tokens. A plan says it, and `plan` reads it here."""

    known = 0


def sequence_data(
    tokens: list[int], prompt_len: int, params: SamplingParams = GREEDY, *, seed: int = 0, **options
) -> KnownData:
    """A request whose known tokens are `tokens`, with room for 20."""
    room = np.full(20, 77, np.int32)  # what lies behind the known tokens must never be used
    room[: len(tokens)] = tokens
    data = KnownData(params, seed, prompt_len, room, **options)
    data.known = len(tokens)
    return data


def plan(
    *rows: tuple[str, KnownData, int, int, tuple[int, ...]],
) -> tuple[Plan, dict[str, SequenceData]]:
    """Rows of (id, sequence data, start, count, blocks)."""
    names, data, starts, counts, tables = zip(*rows, strict=True) if rows else [()] * 5
    lengths = tuple(sequence.known for sequence in data)
    seqs = tuple(
        Seq(Request(name, sequence.prompt_len, 5), i, 20, sequence.known, start, blocks)
        for i, (name, sequence, start, blocks) in enumerate(
            zip(names, data, starts, tables, strict=True)
        )
    )
    step_plan = EMPTY_PLAN._replace(seqs=seqs, lengths=lengths, starts=starts, counts=counts)
    return step_plan, dict(zip(names, data, strict=True))


def pack_plan(step_plan: Plan, sequences, shapes: Shapes = SHAPES, options=DEFAULT) -> Batch:
    blanks = {shape.samples: blank_sampling(shape.samples, options) for shape in shapes.steps}
    return pack(step_plan, sequences, shapes, blanks, options)


def packed(*rows, shapes: Shapes = SHAPES, options=DEFAULT) -> Batch:
    return pack_plan(*plan(*rows), shapes, options)


def one_row(params: SamplingParams) -> Batch:
    return packed(("a", sequence_data([1], 1, params), 0, 1, (1,)))


def equal(array: np.ndarray, *expected) -> None:
    chex.assert_trees_all_equal(array, np.array(expected, array.dtype))


def assert_blank(feature: str, batch: Batch) -> None:
    blank = DEFAULT.blank(len(batch.seq_lens))[feature]
    chex.assert_trees_all_equal(batch.sampling.features[feature], blank)


MIXED = (
    ("decode", sequence_data([10, 11, 12, 13, 14, 15], 4), 5, 1, (7, 3)),
    # stops before the end of its prompt
    ("chunk", sequence_data([20, 21, 22, 23, 24, 25, 26], 7), 2, 3, (1, 9)),
    ("whole", sequence_data([30, 31], 2), 0, 2, (5,)),
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
    assert batch.targets is None, "nobody wants a prompt's log-probabilities"
    assert batch.extras == ()
    chex.assert_type(list(batch[:8]), np.int32)


def test_an_empty_plan_is_all_padding():
    batch = packed()
    chex.assert_trees_all_equal(batch[:7], tuple(np.zeros_like(a) for a in batch[:7]))
    assert batch.targets is None
    equal(batch.cu_q_lens, 0, 0, 0, 0)
    chex.assert_trees_all_equal(batch.sampling, blank_sampling(SHAPES.rows(4)))


@pytest.mark.parametrize(
    ("params", "plain", "logprobs"),
    [
        (GREEDY, True, False),
        (SamplingParams(temperature=0.7, seed=3), True, False),
        (SamplingParams(temperature=0, logprobs=0), True, True),
        (SamplingParams(temperature=0, prompt_logprobs=0), True, False),
        (SamplingParams(temperature=0.7, top_p=0.5), False, True),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}), False, True),
    ],
)
def test_a_step_is_plain_if_the_engine_has_such_programs_and_no_row_has_an_option(
    params, plain, logprobs
):
    """It has log-probabilities if a row wants them."""
    row = ("a", sequence_data([1, 2], 2, params), 0, 2, (1,))
    with_plain = packed(*MIXED, row, shapes=SHAPES._replace(max_seqs=4, plain=True))
    without = packed(*MIXED, row, shapes=SHAPES._replace(max_seqs=4))
    assert with_plain.sampling.is_plain == plain
    assert (with_plain.sampling.num_top is not None) == logprobs
    assert not without.sampling.is_plain
    assert without.sampling.num_top is not None
    if plain:
        without = without._replace(sampling=without.sampling.plain())
    if not logprobs:
        without = without._replace(sampling=without.sampling.without_logprobs())
    chex.assert_trees_all_equal(with_plain, without)


@pytest.mark.parametrize(
    ("params", "plain"),
    [(SamplingParams(temperature=0.7, logprobs=1), True), (SamplingParams(top_p=0.5), False)],
)
def test_drafts_of_rows_without_options_have_a_small_program(params, plain):
    """Log-probabilities of drafts are nobody's."""
    shapes = SHAPES._replace(drafts=2)
    blanks = {3: blank_sampling(3)}
    row = ("a", sequence_data([1, 2], 2, params), 1, 1, (1,))
    step_plan, sequences = plan(row)
    step_plan = step_plan._replace(drafts=(2,))
    shape, batch = pack_drafts(step_plan, sequences, shapes, blanks)
    small, small_batch = pack_drafts(step_plan, sequences, shapes._replace(plain=True), blanks)
    assert (shape.plain, small.plain) == (False, plain)
    assert batch.sampling.num_top is None
    assert small_batch.sampling.is_plain == plain
    if plain:
        batch = batch._replace(sampling=batch.sampling.plain())
    chex.assert_trees_all_equal(small_batch, batch)


def test_the_bucket_is_the_smallest_that_holds_the_tokens():
    assert [SHAPES.bucket(n) for n in (0, 1, 4, 5, 8, 9, 16)] == [4, 4, 4, 8, 8, 16, 16]
    assert [SHAPES.rows(t) for t in (1, 2, 3, 16)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (32, (1, 2, 4, 8, 16, 32)),
        (33, (1, 2, 4, 8, 16, 32, 33)),
        (100, (1, 2, 4, 8, 16, 32, 64, 96, 100)),
    ],
)
def test_decodes_alone_have_closer_buckets_on_a_gpu(most, sizes):
    assert gpu_decode_buckets(most) == sizes


def test_the_bucket_of_decodes_alone_is_the_smallest_of_both_kinds():
    shapes = SHAPES._replace(decode_buckets=(1, 3, 8))
    assert [shapes.decode_bucket(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 3, 3, 4, 8, 16]
    assert SHAPES.decode_bucket(1) == 4


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


def test_options_of_a_row_are_in_its_row_of_the_arrays():
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
    data = sequence_data([1, 2, 3, 4], 2, params, seed=2**32 - 1)
    s = packed(MIXED[0], ("data", data, 3, 1, (2,))).sampling
    equal(s.temperature, 0, 0.5, 0)
    equal(s.num_top, -1, 3, -1)
    equal(s.seed, 0, 2**32 - 1, 0)
    equal(s.position, 2, 2, 0)  # two tokens are out: the next one is the third
    equal(s.prompt_len, 4, 2, 0)
    chex.assert_type(list(s[:5]), [np.float32, np.int32, np.uint32, np.int32, np.int32])
    fields = {name: array for rows in s.features.values() for name, array in rows.fields.items()}
    equal(fields["top_p"], 1, 0.9, 1)
    equal(fields["min_p"], 0, 0.1, 0)
    equal(fields["top_k"], 0, 7, 0)
    equal(fields["presence"], 0, 1.5, 0)
    equal(fields["frequency"], 0, -0.5, 0)
    equal(fields["repetition"], 1, 1.25, 1)
    chex.assert_type(
        [fields[name] for name in ("top_p", "min_p", "presence", "repetition")], np.float32
    )
    chex.assert_type(fields["top_k"], np.int32)
    for name in ("top_p", "min_p", "top_k", "penalties"):
        equal(s.features[name].on, False, True, False)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_of_0_and_of_minus_1_is_off(value):
    assert_blank("top_k", one_row(SamplingParams(top_k=value)))


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_options_of_weights_are_off_for_greedy_rows(option):
    assert_blank(next(iter(option)), one_row(SamplingParams(temperature=0, **option)))


def test_features_that_no_row_uses_take_the_blank_arrays_as_they_are():
    blank = {3: blank_sampling(3)}
    s = pack(*plan(*MIXED), SHAPES, blank).sampling
    assert s.features.keys() == {
        "listed_tokens",
        "bad_words",
        "penalties",
        "min_p",
        "top_k",
        "top_p",
    }
    assert all(rows is blank[3].features[name] for name, rows in s.features.items())
    chex.assert_trees_all_equal(blank[3], blank_sampling(3))


def listed(row: int, batch: Batch) -> tuple[dict[int, float], list[int]]:
    """The biases of a row that always count, and the tokens that are forbidden until min_tokens."""
    fields = batch.sampling.features["listed_tokens"].fields
    ids, always = fields["ids"][row], fields["always_count"][row]
    entries = dict(zip(ids[:always].tolist(), fields["bias"][row, :always].tolist(), strict=True))
    assert len(entries) == always, "a token is listed twice: its bias would be added twice"
    stops = ids[always:][ids[always:] >= 0]
    chex.assert_trees_all_equal(
        fields["bias"][row, always:][: len(stops)], np.full(len(stops), -np.inf, np.float32)
    )
    return entries, stops.tolist()


def test_biases_allowed_tokens_and_suppressed_stops_share_one_list():
    def row(name: str, **params):
        request = SamplingParams(max_tokens=9, **params)
        return name, sequence_data([1, 2, 3], 2, request, stop_ids=(8, 9)), 2, 1, (1,)

    batch = packed(
        row("bias", logit_bias={4: 1.5, 9: -2.0}),
        row("allowed", allowed_token_ids=(4, 5, 5), logit_bias={5: 0.5, 6: 3.0}),
        row("early", min_tokens=2, logit_bias={9: 7.0, 3: 1.0}),
    )
    assert listed(0, batch) == ({4: 1.5, 9: -2.0}, [])
    assert listed(1, batch) == ({4: 0.0, 5: 0.5}, [])
    assert listed(2, batch) == ({3: 1.0, 9: 7.0}, [8, 9])
    fields = batch.sampling.features["listed_tokens"].fields
    equal(fields["only_listed"], False, True, False)
    equal(fields["min_tokens"], 0, 0, 2)
    chex.assert_shape([fields["ids"], fields["bias"]], (3, MAX_LISTED))


# --- features of a user ---------------------------------------------------------------------------

WIDE = RowFeature(
    name="wide",
    stage="logits",
    off={"numbers": np.zeros(50, np.float32), "count": np.int32(-1)},
    read=lambda params, stop_ids: {"numbers": np.arange(50), "count": params.extra_args["wide"]},
    apply=lambda x, rows, context: x + rows["numbers"],
    params=("wide",),
)


def test_a_feature_of_a_user_is_packed_for_the_rows_that_use_it():
    options = chain((WIDE,))
    params = SamplingParams(temperature=0, extra_args={"wide": 3})
    rows = [
        (name, sequence_data([1, 2, 3], 2, row, row_options=options.read(row)), 2, 1, (1,))
        for name, row in (("a", GREEDY), ("b", params))
    ]
    features = packed(*rows, options=options).sampling.features
    assert features.keys() == options.blank(1).keys()
    equal(features["wide"].on, False, True, False)
    equal(features["wide"].fields["count"], -1, 3, -1)
    numbers = np.zeros((3, 50), np.float32)
    numbers[1] = np.arange(50)
    chex.assert_trees_all_equal(features["wide"].fields["numbers"], numbers)
    chex.assert_trees_all_equal_shapes_and_dtypes(features, options.blank(3))


def test_extra_args_that_no_feature_reads_are_refused_with_the_names_that_are_known():
    params = SamplingParams(extra_args={"wude": 3})
    for options, names in ((DEFAULT, "none"), (chain((WIDE,)), "'wide'")):
        with refused(f"^extra_args has 'wude'; the names that this engine knows are: {names}$"):
            options.read(params)


def test_extra_args_are_plain_values_by_name():
    params = SamplingParams(extra_args={"a": 1, "b": [1.5, "x", [True, None]]})
    assert params.extra_args == {"a": 1, "b": (1.5, "x", (True, None))}
    assert SamplingParams().extra_args is None
    with refused(r"extra_args is \['a'\]; it must map names to values"):
        SamplingParams(extra_args=["a"])  # type: ignore[arg-type]
    with refused(r"extra_args is \{3: 1\}; it must map names to values"):
        SamplingParams(extra_args={3: 1})  # type: ignore[dict-item]
    with refused(r"extra_args\['a'\] is <object .*; it must be a number, a string"):
        SamplingParams(extra_args={"a": object()})


def test_more_listed_tokens_than_the_limit_are_refused():
    largest = SamplingParams(allowed_token_ids=tuple(range(MAX_LISTED - 2)), min_tokens=1)
    assert DEFAULT.read(largest, (5, 2000)).names == {"listed_tokens"}
    with refused(r"^1025 tokens are listed in logit_bias, .*; the limit is 1024; list fewer$"):
        DEFAULT.read(largest, (5, 2000, 2001))
    with refused(r"^allowed_token_ids has only stop tokens, but min_tokens is 1$"):
        DEFAULT.read(SamplingParams(allowed_token_ids=(5, 6), min_tokens=1), (5, 6, 7))


def test_values_that_do_not_fit_their_fields_are_refused():
    options = chain((WIDE,))
    with refused(r"^count is 'many'; it must fit int32 of shape"):
        options.read(SamplingParams(extra_args={"wide": "many"}))
    with refused(r"^a row feature has the fields"):
        chain((WIDE._replace(read=lambda params, stop_ids: {"count": 1}),)).read(
            SamplingParams(extra_args={"wide": 1})
        )


def test_features_of_one_name_are_refused():
    for twice in ((WIDE, WIDE), (WIDE._replace(name="top_k"),)):
        with refused(r"use the name '.*' twice"):
            chain(twice)
    with refused("'wide' has stage 'logit'; it must be 'logits' or 'probs'"):
        chain((WIDE._replace(stage="logit"),))  # type: ignore[arg-type]


def test_prompt_tokens_are_targets_of_the_tokens_before_them():
    params = SamplingParams(prompt_logprobs=0)
    prompt = [20, 21, 22, 23, 24, 25, 26]
    decode = ("decode", sequence_data([1, 2, 3], 2, params), 2, 1, (2,))

    def chunk(tokens, start: int, count: int):
        return "a", sequence_data(tokens, 7, params), start, count, (1, 9, 3)

    equal(packed(decode, chunk(prompt, 0, 3)).targets, -1, 21, 22, 23)
    equal(packed(decode, chunk(prompt, 3, 2)).targets, -1, 24, 25, -1)
    # nothing follows the last prompt token but what is sampled
    equal(packed(chunk(prompt, 5, 2)).targets, 26, -1, -1, -1)
    after_preemption = packed(chunk([*prompt, 40, 41], 4, 5))
    equal(after_preemption.targets, 25, 26, *[-1] * 6)


def test_steps_with_targets_have_buckets_of_their_own():
    shapes = SHAPES._replace(prompt_buckets=(16,), decode_buckets=(1, 2, 3))
    wants = sequence_data([20, 21, 22], 3, SamplingParams(prompt_logprobs=0))
    batch = packed(("a", wants, 0, 1, (1,)), shapes=shapes)
    equal(batch.targets, 21, *[-1] * 15)
    equal(batch.cu_q_lens, 0, 1, 1, 1)
    last_of_prompt = packed(("a", wants, 2, 1, (1,)), shapes=shapes)
    assert last_of_prompt.targets is None
    assert last_of_prompt.cu_q_lens is None, "a step of decodes alone"
    assert prompt_buckets((1, 2, 4, 8, 16, 32, 60)) == (1, 8, 60)
    assert prompt_buckets((24,)) == (24,)


@given(data=st.data())
def test_any_plan_lays_every_token_where_its_block_table_says(data):
    shapes = SHAPES._replace(tokens=(1, 2, 4, 8, 16, 60), max_seqs=5)
    ids = iter(data.draw(st.permutations(range(1, 40))))
    rows = []
    for number in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(1, 20))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, min(length - start, 12)))
        table = tuple(next(ids) for _ in range(-(-length // 4)))
        tokens = [100 * number + i for i in range(length)]
        rows.append((f"{number}", sequence_data(tokens, length), start, count, table))
    batch = packed(*rows, shapes=shapes)
    t = shapes.bucket(sum(count for _, _, _, count, _ in rows))
    b = min(t, 5)
    chex.assert_shape(list(batch[:8]), [(t,), (t,), (t,), (b, 5), (b,), (b + 1,), (b,), (b,)])
    chex.assert_type(list(batch[:8]), np.int32)
    assert batch.targets is None
    equal(batch.sampled_row[: len(rows)], *range(len(rows)))
    at = 0
    for row, (_, sequence, start, count, table) in enumerate(rows):
        assert batch.cu_q_lens[row] == at
        assert batch.seq_lens[row] == start + count
        assert batch.last[row] == at + count - 1
        for position in range(start, start + count):
            assert batch.tokens[at] == sequence.tokens[position]
            assert batch.positions[at] == position
            assert batch.slots[at] == table[position // 4] * 4 + position % 4
            at += 1
    padding = batch.tokens[at:], batch.slots[at:], batch.seq_lens[len(rows) :]
    assert not any(array.any() for array in (*padding, batch.block_tables[len(rows) :]))
    assert set(batch.cu_q_lens[len(rows) :].tolist()) == {at}


@given(drafts=st.lists(st.integers(0, 3), min_size=1, max_size=4), chunk=st.integers(0, 5))
def test_a_row_with_drafts_has_a_sample_after_each(drafts, chunk):
    """Sample j of a row follows the token j places behind its last known one, and has the next
    position.
    """
    shapes = SHAPES._replace(tokens=(8, 32), max_seqs=5, drafts=3)
    rows = []
    for i, k in enumerate(drafts):
        params = SamplingParams(temperature=1.0, seed=i)
        data = sequence_data([*range(4 + i), *[40] * k], 3, params, seed=i)
        rows.append((f"{i}", data, 3 + i, 1 + k, (2 * i + 1, 2 * i + 2, 20 + i)))
    if chunk:
        rows.append(("chunk", sequence_data(list(range(6)), 6), 0, chunk, (30, 31)))
    step_plan, sequences = plan(*rows)
    known_tokens = tuple(4 + i for i in range(len(drafts))) + ((6,) if chunk else ())
    counts = (*drafts, 0) if chunk else tuple(drafts)
    step_plan = step_plan._replace(lengths=known_tokens, drafts=counts if any(counts) else ())
    batch = pack_plan(step_plan, sequences, shapes)
    r = shapes.samples(shapes.bucket(sum(step_plan.counts)), any(counts))
    sampling = batch.sampling
    chex.assert_shape([batch.last, batch.sampled_row, sampling.position, sampling.seed], (r,))
    at = 0
    for row, k in enumerate(counts):
        start = int(batch.cu_q_lens[row])
        for j in range(k + 1):
            if row < len(drafts):
                assert batch.last[at] == start + j
                assert batch.positions[batch.last[at]] == known_tokens[row] - 1 + j
                assert sampling.position[at] == known_tokens[row] - 3 + j
                assert sampling.seed[at] == row
            else:
                assert batch.last[at] == start + chunk - 1
            assert batch.sampled_row[at] == row
            at += 1
    assert not batch.last[at:].any()


def test_a_feature_is_read_only_if_a_request_sets_what_it_reads():
    read = []
    feature = WIDE._replace(
        read=lambda params, stop_ids: read.append(params), params=("wide", "min_p")
    )
    options = chain((feature,))
    for params in (
        GREEDY,
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1),
        SamplingParams(extra_args={"wide": 1}),
    ):
        options.read(params)
    assert [params.min_p for params in read] == [0.1, 0.0]
    with refused(r"extra_args has 'min_p'; .*: 'wide'$"):
        options.read(SamplingParams(extra_args={"min_p": 0.1}))
