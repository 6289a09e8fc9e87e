"""The benchmark of scaling: calculated counts match arrays and the compiler's counts. No times are
tested.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments.bench import scale, scale_calculated, scale_report
from experiments.bench.scale import QUICK, WARM_STEPS, checked_setup
from experiments.bench.scale_calculated import (
    BLOCK,
    EXTRA_TOKENS,
    CalculatedStep,
    Rates,
    Shape,
    calculated_step,
)
from experiments.bench.scale_report import line
from pagedjax.device import cache
from pagedjax.device.batch import blank_sampling
from pagedjax.device.models import llama
from pagedjax.engine.pack import pack
from pagedjax.host.types import EMPTY_PLAN

README = Path(scale.__file__).parents[1] / "results" / "README.md"
KEPT_FIGURES = Path(scale.__file__).parents[1] / "results" / "cpu" / "scale" / "scale.json"
ODD_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def size(tree) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def config():
    return llama.from_hf(ODD_SIZES | {"num_hidden_layers": 3, "vocab_size": 320})


# --- on paper -------------------------------------------------------------------------------------


@pytest.mark.default_cases("True-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_paper_weights_match_parameters(tied: bool, bias: bool):
    body = ODD_SIZES | {
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "max_position_embeddings": 100,
    }
    model = scale.model_of(Shape(5, 30, 3, 320), body)
    step = calculated_step(model.config, sequences=5, context=30)
    assert step.weights == size(model.params)
    read = size(model.params) - size(model.params["angles"])
    assert step.weights_read == read - (0 if tied else (320 - 5) * 48 * 4), (
        "five rows of the embedding"
    )


def test_paper_products_match_compiler_flops():
    model = scale.model_of(Shape(8, 30, 3, 320), ODD_SIZES | {"tie_word_embeddings": True})

    def products(params) -> float:
        flat, tree = jax.tree.flatten(params)

        def run(*ws):
            matrices = [w for w in jax.tree.leaves(tree.unflatten(ws)) if w.ndim == 2]
            return [w @ jnp.ones((w.shape[1], 8)) for w in matrices]

        return jax.jit(run).lower(*flat).cost_analysis()["flops"]

    assert calculated_step(model.config, sequences=8, context=30).products == products(model.params)


def test_paper_attention_matches_compiler_flops():
    c = config()
    b = 5
    n = 30
    group = c.heads // c.kv_heads

    def attend(q, k, v):
        scores = jnp.einsum("bkgd,bknd->bkgn", q, k)
        return jnp.einsum("bkgn,bknd->bkgd", scores, v)

    q = jnp.ones((b, c.kv_heads, group, c.head_dim))
    keys = jnp.ones((b, c.kv_heads, n, c.head_dim))
    counted = jax.jit(attend).lower(q, keys, keys).cost_analysis()["flops"]
    step = calculated_step(c, sequences=b, context=n)
    assert step.attention == c.layers * counted
    assert step.kv_read == c.layers * size((keys, keys))


@pytest.mark.parametrize(("sequences", "context"), [(1, 40), (5, 30), (7, 64)])
def test_paper_cache_and_inputs_match_arrays(sequences: int, context: int):
    c = config()
    shapes = scale.shapes_of(Shape(sequences, context, 3, 320))
    pages = cache.init(
        layers=3,
        blocks=sequences * math.ceil((context + EXTRA_TOKENS) / BLOCK),
        block_size=BLOCK,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype="float32",
    )
    batch = pack(EMPTY_PLAN, {}, shapes, {sequences: blank_sampling(sequences)})
    step = calculated_step(c, sequences, context)
    assert step.cache == size(pages)
    assert step.inputs == size(batch)
    chex.assert_type([*pages.k, *pages.v], scale_calculated.DTYPE)
    chex.assert_shape([batch.tokens, batch.positions], (sequences,))
    chex.assert_shape(batch.block_tables, (sequences, math.ceil((context + EXTRA_TOKENS) / BLOCK)))


def test_roofline_takes_slower_of_traffic_and_arithmetic():
    fields = dict.fromkeys(CalculatedStep._fields, 0)
    step = CalculatedStep(
        **{**fields, "weights_read": 100, "kv_read": 30, "products": 1000, "attention": 60}
    )
    assert scale_calculated.roofline(step, Rates(read=10.0, multiply=1000.0)) == 10 + 3
    assert scale_calculated.roofline(step, Rates(read=10.0, multiply=10.0)) == 100 + 6
    assert scale_calculated.roofline(step, Rates(read=10.0, multiply=50.0)) == 20 + 3


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sequences", "steps"), [(1, 1), (16, 5), (20, scale.MAX_STEPS)])
def test_middle_step_has_the_given_context(sequences: int, steps: int):
    context = 64
    middle = WARM_STEPS + steps // 2
    shapes = scale.shapes_of(Shape(sequences, context, 1, 50))
    blanks = {sequences: blank_sampling(sequences)}
    host = scale.state_after_prompts(shapes, context, middle)
    lengths = []
    tokens = []
    for i in range(WARM_STEPS + steps):
        host, _, batch = scale.advance(
            host, shapes, blanks, lambda batch, i=i: batch.tokens * 0 + i
        )
        chex.assert_trees_all_equal(batch.cu_q_lens, jnp.arange(sequences + 1))  # one token each
        lengths.append(batch.seq_lens)
        tokens.append(batch.tokens)
    assert len(host.state.running.seqs) == sequences, "no sequence has ended"
    assert lengths[middle][0] == context
    assert lengths[middle].mean() == pytest.approx(context, abs=0.5)
    assert lengths[-1].max() < context + EXTRA_TOKENS
    # a step computes the tokens sampled before it
    sampled = jnp.full(sequences, WARM_STEPS + steps - 2, jnp.int32)
    chex.assert_trees_all_equal(tokens[-1], sampled)
    # the full blocks of a prompt have hashes; prompts are a block shorter at most than others
    full_blocks = (context - middle) // BLOCK - 1
    assert all(len(seq.hashes) >= full_blocks for seq in host.state.running.seqs)


def test_sequences_begin_blocks_in_different_steps():
    shapes = scale.shapes_of(Shape(16, 64, 1, 50))
    host = scale.state_after_prompts(shapes, 64, 5)
    assert sorted(length % BLOCK for length in host.state.running.lengths) == list(range(BLOCK))


# --- the report -----------------------------------------------------------------------------------


def test_line_fit_minimizes_relative_error():
    coefficients = line([1, 4, 16, 1024], [12, 18, 42, 2058])
    assert coefficients == pytest.approx((10, 2, 0), abs=1e-6)
    assert line([1, 2, 4], [1, 1, 2]).largest_error == pytest.approx(0.18, abs=0.02)


@pytest.mark.slow
def test_command_measures_every_point(tmp_path, capsys):
    """With the least that every factor takes."""
    file = tmp_path / "scale.json"
    assert scale.main(["--quick", "--steps", "2", "--json", str(file)]) == 0
    report = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["command"] == "python -m experiments.bench.scale --quick --steps 2"
    assert {name: [p[name] for p in points] for name, points in figures["factors"].items()} == {
        name: list(values) for name, values in QUICK.values.items()
    }
    for point in [p for points in figures["factors"].values() for p in points]:
        assert len(point["step_ms"]) == len(point["host_us"]) == 2
        assert min(*point["step_ms"], *point["host_us"]) > 0
        assert scale_report.difference(point) == 0, (
            "the compiler's arguments are weights, cache and inputs"
        )
        assert point["compiled"]["activations"] >= point["paper"]["activations"]
    assert scale.main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == report


def test_documented_tables_match_kept_figures():
    _, _, after_marker = README.read_text(encoding="utf-8").partition("<!-- scale -->\n")
    text, _, _ = after_marker.partition("<!-- end -->")
    assert text == scale_report.report(scale.read_figures(KEPT_FIGURES)), (
        "paste what `python -m experiments.bench.scale --show` prints of the file"
    )


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "41"], "--steps is 41; a sequence has room for 40: choose 1 to 40"),
        (["--json", "no/such/folder/out.json"], "in a folder that does not exist; make it first"),
        (["--show", "no.json"], "--show is no.json, which cannot be read"),
        (["--show", __file__], "give a file that --json wrote"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(scale, "run", lambda *_: pytest.fail("this would take minutes"))
    with pytest.raises(SystemExit):
        scale.main(words)
    assert message in " ".join(capsys.readouterr().err.split())


def test_show_refuses_other_files(tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"factors": {"sequences": []}}')
    with pytest.raises(ValueError, match="has no factors"):
        scale.read_figures(file)


def test_point_beyond_memory_error_has_remedy():
    body = {**QUICK.body, "max_position_embeddings": 96 + EXTRA_TOKENS}
    need = scale_calculated.needed_bytes(Shape(2, 48, 2, 256), body)
    assert checked_setup(QUICK, 3, need).body == body
    with pytest.raises(ValueError, match=r"layers=2, .* takes 0\.\d\d MiB, .* free some memory"):
        checked_setup(QUICK, 3, need - 1)
    # a device without a known size is not checked
    assert checked_setup(QUICK, 3, None).values == QUICK.values
