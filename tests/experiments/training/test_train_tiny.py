"""Training a tiny model for a few steps: served logits match, and a killed run resumes
bit-exact.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.training import data as training_data
from experiments.training import forward, train_tiny
from experiments.training.data import END
from experiments.training.setup import Setup
from pagedjax import LLM, SamplingParams
from pagedjax.device.models import llama
from pagedjax.engine import compilations
from pagedjax.weights.tree import named
from tests.experiments.training.child import killed
from tests.experiments.training.models import stored

ROOT = Path(__file__).parents[3]
SETUP = Setup(steps=24, vocab=300, layers=1, hidden=32, heads=4, kv_heads=2, context=32, batch=4)
EVERY = 8
LENGTH = 12  # generated tokens
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
# a process that kills itself while the second checkpoint is written
CHILD = """
import os, signal, sys
from pathlib import Path
import orbax.checkpoint as ocp
from experiments.training import train_tiny

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def second(manager, step, state, losses):
    if step == 16:
        ocp.JsonCheckpointHandler.async_save = ocp.JsonCheckpointHandler.save = kill
    save(manager, step, state, losses)

out, setup, every = sys.argv[1:]
save, train_tiny.save = train_tiny.save, second
train_tiny.train(Path(out), eval(setup, {"Setup": train_tiny.Setup}), int(every))
"""


@pytest.fixture(scope="module")
def data() -> train_tiny.Data:
    return train_tiny.prepare(SETUP.vocab)


@pytest.fixture(scope="module", autouse=True)
def _prepared(data):
    """The data is prepared once for this process, and the programs of a setup are compiled once;
    child processes do both again.
    """
    make_trainer = train_tiny.make_trainer
    trainers = {}

    def trainer_of(setup: Setup, *rest: Any) -> train_tiny.Trainer:
        if setup not in trainers:
            trainer = make_trainer(setup, *rest)
            trainers[setup] = trainer, jax.device_get(trainer.start)
        trainer, start = trainers[setup]
        return trainer._replace(start=jax.device_put(start, may_alias=False))  # it is donated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_tiny, "prepare", lambda vocab: data)
        patch.setattr(train_tiny, "make_trainer", trainer_of)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """A complete run without interruption."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    messages = []
    losses = train_tiny.train(out, SETUP, EVERY, say=messages.append)
    return SimpleNamespace(out=out, messages=messages, losses=losses)


@pytest.fixture(scope="module")
def config():
    return llama.from_hf(train_tiny.hf_config(SETUP))


# --- text -----------------------------------------------------------------------------------------


def test_held_out_text_is_a_tenth_without_overlap():
    parts = training_data.texts()
    paragraphs = [[p for topic in topics for p in topic.split("\n\n") if p] for topics in parts]
    assert not set(paragraphs[0]) & set(paragraphs[1])
    assert len(paragraphs[0]) == len(set(paragraphs[0])) > 1000
    assert 0.05 < len(paragraphs[1]) / len(paragraphs[0]) < 0.15


def test_tokens_are_the_text_and_topics_have_an_end(data):
    train, held_out = training_data.texts()
    for tokens, parts in ((data.train, train), (data.held_out, held_out)):
        assert data.tokenizer.decode(tokens, skip_special_tokens=False) == "".join(
            part + END for part in parts
        )
        assert (tokens == 0).sum() == len(parts)
        assert 0 <= tokens.min() <= tokens.max() < SETUP.vocab


def test_window_depends_on_seed_and_step_only(data):
    window = train_tiny.windows(data.train, SETUP, 7)
    chex.assert_shape(window, (SETUP.batch, SETUP.context + 1))
    np.testing.assert_array_equal(window, train_tiny.windows(data.train, SETUP, 7))
    for other_window in (
        train_tiny.windows(data.train, SETUP, 8),
        train_tiny.windows(data.train, replace(SETUP, seed=1), 7),
    ):
        assert (window != other_window).any()
    text = data.train.tobytes()
    assert all(text.find(row.astype(np.int32).tobytes()) >= 0 for row in window)


def test_held_out_tokens_are_predicted_once(data):
    parts = np.concatenate(train_tiny.held_out_batches(data.held_out, SETUP))
    count = len(parts) * SETUP.context
    assert len(data.held_out) - count <= SETUP.batch * SETUP.context
    np.testing.assert_array_equal(parts[:, :-1].reshape(-1), data.held_out[:count])
    np.testing.assert_array_equal(parts[:, 1:].reshape(-1), data.held_out[1 : count + 1])


# --- training and serving use the same forward pass -----------------------------------------------


LOGITS = jax.jit(forward.logits)


@pytest.fixture(scope="module")
def module():
    return train_tiny.initial(llama.from_hf(train_tiny.hf_config(replace(SETUP, layers=2))), 1)


def test_written_model_gives_training_logprobs(run):
    """Greedy tokens are the best ones of the training forward pass, with its log-probabilities."""
    llm = LLM(model=run.out / "model", **train_tiny.serving())
    (out,) = llm.generate(["The function"], GREEDY, use_tqdm=False)
    tokens = [*out.prompt_token_ids, *out.outputs[0].token_ids]
    module = nnx.merge(llm.model.model.graphdef, llm.model.model.params)
    logits = np.asarray(LOGITS(module, jnp.asarray([tokens]))[0])[-LENGTH - 1 : -1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    assert out.outputs[0].token_ids == tuple(np.argmax(logprobs, -1))
    served = [
        entry[token].logprob
        for entry, token in zip(out.outputs[0].logprobs, tokens[-LENGTH:], strict=True)
    ]
    chex.assert_trees_all_close(
        np.array(served, np.float32), logprobs.max(-1), rtol=1e-7, atol=1e-4
    )
    assert out.outputs[0].text == llm.tokenizer.decode(tokens[-LENGTH:])


def test_all_parameters_train_and_are_served_without_compilation(config, data):
    trainer = train_tiny.make_trainer(SETUP, config, data)
    state = trainer.start
    tokenizer = data.tokenizer
    first = {name: np.array(x) for name, x in named(state.params).items()}
    assert set(first) == {".".join(entry.path) for entry in llama.param_table(config)}
    llm = LLM(
        params=state.params,
        config=train_tiny.hf_config(SETUP),
        tokenizer=tokenizer,
        **train_tiny.serving(),
    )
    texts = {train_tiny.sample(llm)}
    for step in range(4):
        # donates the old state
        state, _ = trainer.update(state, train_tiny.windows(data.train, SETUP, step))
        before = compilations.counts()
        text, compiled = train_tiny.sample_with(llm, state.params)
        assert (compiled, compilations.counts()) == (0, before)
        texts.add(text)
    assert len(texts) > 1
    trained = dict(named(state.params))
    served = {name: x for name, x in named(llm.engine.model.params).items() if name in trained}
    chex.assert_trees_all_equal(served, trained)
    chex.assert_trees_all_equal_shapes_and_dtypes(trained, first)
    chex.assert_tree_all_finite(trained)
    assert not [name for name, x in trained.items() if (x == first[name]).all()]


# --- the run --------------------------------------------------------------------------------------


def test_run_learns_and_writes_model(run):
    first, *_, last = run.losses
    assert [entry["step"] for entry in run.losses] == [8, 16, 24]
    assert last["train"] < first["train"]
    assert last["held_out"] < first["held_out"] < np.log(SETUP.vocab)
    assert run.messages[-1].startswith(f"{run.out / 'model'}: The function")
    about = json.loads((run.out / "run.json").read_text())
    assert about.items() >= {"steps": 24, "seed": 0, "context": 32}.items()
    assert {path.name for path in (run.out / "model").iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "params",
    }
    assert sorted(path.name for path in (run.out / "checkpoints").iterdir()) == ["16", "24"]


class Stops(Exception):
    pass


@pytest.mark.slow
def test_stopped_run_resumes_bit_exact(run, tmp_path, monkeypatch):
    out = tmp_path / "tiny"
    windows = train_tiny.windows

    def stopping(train, setup, step):
        if step == 13:
            raise Stops
        return windows(train, setup, step)

    with monkeypatch.context() as patched:
        patched.setattr(train_tiny, "windows", stopping)
        with pytest.raises(Stops):
            train_tiny.train(out, SETUP, EVERY, say=lambda _: None)
    assert not (out / "model").exists()
    messages = []
    assert train_tiny.train(out, SETUP, EVERY, say=messages.append) == run.losses
    assert messages[0].endswith("; 8 of 24 steps are done")
    chex.assert_trees_all_equal(stored(out / "model"), stored(run.out / "model"))


@pytest.mark.slow
def test_killed_run_resumes_bit_exact(run, tmp_path):
    out = tmp_path / "tiny"
    printed = killed(CHILD, out, repr(SETUP), EVERY)
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["8"]
    assert not (out / "model").exists()
    messages = []
    assert train_tiny.train(out, SETUP, EVERY, say=messages.append) == run.losses
    assert messages[0].endswith("; 8 of 24 steps are done")
    chex.assert_trees_all_equal(stored(out / "model"), stored(run.out / "model"))


def test_finished_run_only_rewrites_missing_model(run, monkeypatch):
    monkeypatch.setattr(train_tiny, "windows", lambda *_: pytest.fail("no step is left"))
    stored_before = stored(run.out / "model")
    model = run.out / "model"
    messages = []
    model.rename(run.out / "before")
    try:
        assert train_tiny.train(run.out, SETUP, EVERY, say=messages.append) == run.losses
        assert messages[0].endswith("; 24 of 24 steps are done")
        assert messages[-1] == run.messages[-1]
        chex.assert_trees_all_equal(stored(model), stored_before)
    finally:
        if not model.exists():
            (run.out / "before").rename(model)


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--seed", str(2**32)], "--seed is 4294967296; it must be in [0, 2**32)"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        train_tiny.main(["--out", str(tmp_path / "x"), *words])
    assert message in " ".join(capsys.readouterr().err.split())


def test_foreign_folder_is_refused_and_unchanged(run, data, tmp_path, capsys):
    begin = lambda out, *run: train_tiny.begin(out, train_tiny.options(*run))  # noqa: E731
    with pytest.raises(
        ValueError,
        match=r"tiny holds another run: steps is 9, there 24; seed is 2, there 0\. Use its",
    ):
        begin(run.out, replace(SETUP, steps=9, seed=2), data)
    with pytest.raises(ValueError, match=r"another run: text is \w{16}, there \w{16}\. .* version"):
        begin(run.out, SETUP, data._replace(train=data.train[1:]))
    begin(run.out, SETUP, data)
    (tmp_path / "notes").write_text("mine")
    assert train_tiny.main(["--out", str(tmp_path)]) == 2
    assert (
        "exists and is not an empty folder; choose a new folder, or remove this one first"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"run\.json is damaged .* remove .*, or give another --out"
    ):
        begin(tmp_path, SETUP, data)
