"""Training a draft head for a tiny model: its loss is what an engine will do, and a killed run
resumes bit-exact.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.training import draft_data, train_draft
from experiments.training.draft_data import Windows
from experiments.training.draft_loss import PASS_DECAY, drafts, loss
from experiments.training.draft_setup import DraftSetup
from pagedjax import load_model
from pagedjax.device.windows import packed
from pagedjax.weights.draft_model import read_eagle
from pagedjax.weights.tree import named
from tests.weights.tiny import tiny_llama

ROOT = Path(__file__).parents[3]
SIZES = {
    "vocabulary": 48,
    "windows": 12,
    "held_out": 4,
    "prompt": 8,
    "output": 12,
    "batch": 4,
    "passes": 3,
}
EVERY = 4
STEPS = 12
PASSES = 3


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> DraftSetup:
    folder = tiny_llama(
        tmp_path_factory.mktemp("model") / "llama", layers=3, tied=False, max_len=64
    )
    return DraftSetup(model=str(folder), steps=STEPS, rate=3e-3, **SIZES)


@pytest.fixture(scope="module")
def run(setup, tmp_path_factory) -> SimpleNamespace:
    """A complete run without interruption."""
    out = tmp_path_factory.mktemp("run") / "draft"
    messages = []
    losses = train_draft.train(out, setup, EVERY, say=messages.append)
    return SimpleNamespace(out=out, messages=messages, losses=losses)


@pytest.fixture(scope="module")
def model(setup):
    return load_model(setup.model, dtype="float32").model


def stored(out: Path, model) -> dict[str, np.ndarray]:
    """The parameters of a run's head."""
    return {
        name: np.asarray(x)
        for name, x in named(read_eagle(out / "head", model.config, "float32").params).items()
    }


# --- what the passes compute ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(model) -> SimpleNamespace:
    """A head of random parameters, and two windows of random tokens and features."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    shape = (2, 9)
    ids = np.sort(rng.permutation(vocabulary)[:20]).astype(np.int32)
    graphdef, params, buffers = train_draft.initial(model, ids, seed=0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)
    windows = Windows(
        rng.integers(0, vocabulary, shape).astype(np.int32),
        rng.standard_normal((*shape, 3 * model.config.hidden)).astype(np.float16),
        rng.permuted(np.tile(np.arange(vocabulary, dtype=np.int32), (*shape, 1)), axis=-1)[..., :8],
        rng.dirichlet(np.ones(9), shape)[..., :8].astype(np.float32),
    )
    decoder = nnx.merge(model.graphdef, model.params)

    @jax.jit
    def logits(windows: Windows) -> list[jax.Array]:
        return drafts(
            nnx.merge(graphdef, params, buffers),
            decoder.embedded(packed(windows.tokens)),
            windows,
            PASSES,
        )

    @jax.jit
    def loss_of(windows: Windows, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(nnx.merge(graphdef, params, buffers), decoder, place, windows, PASSES)

    place = np.full(vocabulary, -1, np.int32)
    place[ids] = np.arange(len(ids))
    return SimpleNamespace(
        windows=windows, logits=logits, loss=loss_of, params=params, ids=ids, place=place
    )


def as_an_engine(
    params: dict[str, np.ndarray], c, embedded: np.ndarray, features: np.ndarray
) -> dict:
    """{(pass, position): logits} of one window, token by token in float64.

    From each token t on, the head drafts with its own features. The embeddings are those of the
    known tokens.

    Args:
        embedded: [S, H]. features: [S, taps * H].
    """
    group = c.heads // c.kv_heads
    half = c.head_dim // 2
    frequencies = 10000.0 ** (-np.arange(half) / half)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + c.eps) * params[f"{name}.weight"]

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        a = x[:, :half]
        b = x[:, half:]
        angle = position * frequencies
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
        )

    def layer(position: int, before: np.ndarray, keys: list, values: list) -> tuple:
        joined = [norm("embed_norm", embedded[position]), norm("feature_norm", before)]
        x = params["join.weight"] @ np.concatenate(joined)
        heads = params["block.attn.qkv.weight"] @ norm("block.attn_norm", x)
        q, k, v = np.split(heads.reshape(-1, c.head_dim), [c.heads, c.heads + c.kv_heads])
        keys = [*keys, rotated(k, position)]
        values = [*values, v]
        # [S, heads, D]
        all_keys, all_values = (np.repeat(kv, group, axis=1) for kv in (keys, values))
        scores = np.einsum("hd,shd->sh", rotated(q, position), all_keys) / np.sqrt(c.head_dim)
        weights = np.exp(scores - np.logaddexp.reduce(scores, axis=0))
        outputs = np.einsum("sh,shd->hd", weights, all_values).reshape(-1)
        x = x + params["block.attn.out.weight"] @ outputs
        gate, up = np.split(params["block.mlp.up.weight"] @ norm("block.mlp_norm", x), 2)
        return x + params["block.mlp.down.weight"] @ (gate / (1 + np.exp(-gate)) * up), keys, values

    out = {}
    true = ([], [])
    project = lambda u: params["head.weight"] @ norm("norm", u)  # noqa: E731
    for t in range(len(embedded)):
        before = params["fuse.weight"] @ features[t - 1] if t else np.zeros(c.hidden)
        u, *true = layer(t, before, *true)
        out[0, t] = project(u)
        keys, values = true
        for s in range(1, min(PASSES, len(embedded) - t)):
            u, keys, values = layer(t + s, u, keys, values)
            out[s, t + s] = project(u)
    return out


@pytest.mark.slow
def test_every_pass_computes_what_an_engine_computes_token_by_token(case, model):
    params = {name: np.asarray(x, np.float64) for name, x in named(case.params).items()}
    all_logits = case.logits(case.windows)
    chex.assert_shape(all_logits, (*case.windows.tokens.shape, len(case.ids)))
    chex.assert_type(all_logits, jnp.float32)
    chex.assert_tree_all_finite(all_logits)
    embed = np.asarray(model.params["embed"].get_value(), np.float64)
    for b, tokens in enumerate(case.windows.tokens):
        features = case.windows.features[b].astype(np.float64)
        expected = as_an_engine(params, model.config, embed[tokens], features)
        assert len(expected) == sum(len(tokens) - s for s in range(PASSES))
        for (s, position), logits in expected.items():
            chex.assert_trees_all_close(
                np.asarray(all_logits[s][b, position], np.float64), logits, rtol=1e-4, atol=1e-4
            )


def test_the_loss_is_the_cross_entropy_of_the_targets_that_the_head_knows(case):
    windows = case.windows
    losses = []
    agreement = []
    places = case.place[windows.ids]
    shares = np.where(places >= 0, windows.shares, 0).astype(np.float64)
    for s, logits in enumerate(case.logits(windows)):
        x = np.asarray(logits, np.float64)[:, s:]
        logp = x - np.log(np.exp(x).sum(-1, keepdims=True))
        of_targets = np.take_along_axis(logp, np.maximum(places[:, s:], 0), axis=-1)
        losses.append(-(shares[:, s:] * of_targets).sum() / shares[:, s:].sum())
        agreement.append((x.argmax(-1) == places[:, s:, 0]).mean())
    expected = np.average(losses, weights=PASS_DECAY ** np.arange(PASSES))
    chex.assert_trees_all_close(
        case.loss(windows, case.place),
        (np.float32(expected), np.array(agreement, np.float32)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_gradients_reach_every_parameter(setup, run, model):
    """Of the run: no parameter of its head is where it began."""
    ids = np.array(json.loads((run.out / "head" / "config.json").read_text())["ids"], np.int32)
    first = named(train_draft.initial(model, ids, setup.seed)[1])
    last = stored(run.out, model)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        dict(last), {name: np.asarray(x) for name, x in first.items()}
    )
    chex.assert_tree_all_finite(dict(last))
    assert not [name for name, x in last.items() if (x == np.asarray(first[name])).all()]


# --- data -----------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_and_an_epoch_has_each_window_once():
    setup = DraftSetup(batch=4, seed=3)
    rows = np.arange(12)
    column = rows[:, None, None]
    windows = Windows(rows[:, None], column, column, column)

    def tokens_of(setup: DraftSetup) -> np.ndarray:
        """Of three epochs; all columns have the same rows."""
        batches = [draft_data.batch(windows, setup, step) for step in range(9)]
        for batch in batches:
            chex.assert_trees_all_equal(*(x.reshape(-1) for x in batch))
        return np.array([batch.tokens.reshape(-1) for batch in batches])

    tokens = tokens_of(setup)
    epochs = tokens.reshape(3, 12)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(rows, (3, 1)))
    assert (epochs[0] != epochs[1]).any()
    np.testing.assert_array_equal(tokens_of(setup), tokens)
    assert (tokens_of(replace(setup, seed=4)) != tokens).any()


def test_vocabulary_has_the_ids_of_most_probability():
    ids = np.array([[[5, 2], [7, 5], [9, 2]]], np.int32)
    # 5: 0.8, 7: 0.7, 2: 0.7, 9: 0.5
    shares = np.array([[[0.6, 0.3], [0.7, 0.2], [0.5, 0.4]]], np.float32)
    windows = Windows(np.zeros((1, 3), np.int32), None, ids, shares)
    assert [draft_data.vocabulary(windows, size, 12).tolist() for size in (1, 3, 4)] == [
        [5],
        [2, 5, 7],
        [2, 5, 7, 9],
    ]
    assert draft_data.vocabulary(windows, 4, 12).dtype == np.int32


@pytest.mark.slow
def test_stored_features_are_the_models_layers_and_shares_its_probabilities(run, model):
    windows = draft_data.load(run.out / "held_out.npz")
    n, s = windows.tokens.shape
    assert (n, s) == (SIZES["held_out"], SIZES["prompt"] + SIZES["output"])
    chex.assert_shape(windows[1:], [(n, s, 3 * 64), (n, s, 8), (n, s, 8)])
    chex.assert_type(list(windows), [np.int32, np.float16, np.int32, np.float32])
    assert (np.diff(windows.shares, axis=-1) <= 0).all()
    assert (windows.shares.sum(-1) <= 1 + 1e-6).all()
    # the first prompt is continued greedily
    np.testing.assert_array_equal(
        windows.tokens[0, SIZES["prompt"] :], windows.ids[0, SIZES["prompt"] - 1 : -1, 0]
    )
    params = {name: np.asarray(x, np.float64) for name, x in named(model.params).items()}
    last = windows.features[..., -64:].astype(np.float64)
    scale = np.sqrt((last**2).mean(-1, keepdims=True) + model.config.eps)
    logits = (last / scale * params["norm.weight"]) @ params["head.weight"].T
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    shares = np.take_along_axis(p, windows.ids, axis=-1)
    np.testing.assert_allclose(shares, windows.shares, atol=0.02)


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_learns_and_writes_a_head_that_an_engine_uses(run, model):
    assert [entry["step"] for entry in run.losses] == [4, 8, 12]
    first, *_, last = run.losses
    assert last["held_out"] < first["held_out"]
    assert all(len(entry["right"]) == PASSES for entry in run.losses)
    match = re.search(
        r"an engine accepts ([\d.]+) % of (\d+) drafts .*, ([\d.]+) tokens of a sequence a step",
        run.messages[-1],
    )
    assert match is not None
    assert 0 <= float(match[1]) <= 100
    assert int(match[2]) > 0
    assert 1 <= float(match[3]) <= 1 + train_draft.DRAFTS
    head = read_eagle(run.out / "head", model.config, "float32")
    assert head.taps == (0, 1, 2)
    ids = json.loads((run.out / "head" / "config.json").read_text())["ids"]
    windows = draft_data.load(run.out / "windows.npz")
    assert ids == draft_data.vocabulary(windows, SIZES["vocabulary"], 320).tolist()


@pytest.mark.slow
def test_folder_of_another_run_is_refused_and_unchanged(setup, run):
    before = sorted(path.name for path in run.out.rglob("*"))
    other_setup = replace(setup, steps=9, seed=2, batch=2)
    different = "steps is 9, there 12; seed is 2, there 0; batch is 2, there 4"
    with pytest.raises(ValueError, match=rf"another run: {different}\. Use its"):
        train_draft.train(run.out, other_setup, EVERY)
    assert sorted(path.name for path in run.out.rglob("*")) == before


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--windows", "3"], "--windows is 3, below --batch 4; raise it, or lower --batch"),
        (["--rate", "nan"], "--rate is nan; it must be above 0 and finite"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        train_draft.main(["--out", str(tmp_path / "x"), *words])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "60", "--output", "10"], "windows of 60 \\+ 10 tokens .* has room for 64"),
        (["--vocabulary", "321"], "a vocabulary of 321 tokens; the model has 320"),
        (["--model", "/no/model"], "^error: "),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_folder_is_made(
    setup, words, message, capsys, tmp_path
):
    sizes = ["--model", setup.model, "--vocabulary", "48", "--prompt", "8", "--output", "12"]
    assert train_draft.main(["--out", str(tmp_path / "x"), *sizes, *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "x").exists()
