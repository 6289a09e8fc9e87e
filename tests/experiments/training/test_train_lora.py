"""Training adapters: step 0 is the base, the engine gives the trainer's numbers, a stopped run
resumes bit-exact.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from experiments.training import train_lora
from experiments.training.lora_setup import LoraSetup
from experiments.training.lora_tasks import DIGITS, question, tasks
from experiments.training.setup import Setup
from pagedjax import load_model
from pagedjax.models import score
from pagedjax.weights.adapter_files import read_adapter
from pagedjax.weights.convert import convert
from tests.experiments.training.child import killed
from tests.experiments.training.models import write_initial

ROOT = Path(__file__).parents[3]
SMALL = Setup(vocab=300, layers=1, hidden=32, heads=4, kv_heads=2, context=64)
# examples of both tasks have one shape, so they share their programs
SETUP = LoraSetup(steps=12, rank=4, alpha=8, context=38, batch=8, lists=8, held_out=8, rate=2e-2)
EVERY = 4
NAMES = ["upper", "sort"]
# a process that kills itself while the second checkpoint is due
CHILD = """
import os, signal, sys
from pathlib import Path
from experiments.training import train_lora
from experiments.training.lora_setup import LoraSetup
original = train_lora.save
def save(manager, step, *rest):
    if step > int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    original(manager, step, *rest)
train_lora.save = save
train_lora.train(Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3]), int(sys.argv[4]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_initial(tmp_path_factory.mktemp("lora") / "model", SMALL)


@pytest.fixture(scope="module")
def complete_run(model, tmp_path_factory) -> Any:
    """A run without interruption."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    losses, report = train_lora.train(model, out, SETUP, EVERY, say=lambda _: None)
    return SimpleNamespace(out=out, losses=losses, report=report)


@pytest.fixture(scope="module")
def loaded(model) -> Any:
    return load_model(model, dtype="float32", linear_impl="xla")


@pytest.fixture(scope="module")
def module(loaded) -> Any:
    return nnx.merge(loaded.model.graphdef, loaded.model.params)


@pytest.fixture(scope="module")
def named_tasks(loaded) -> Any:
    return tasks(loaded.tokenizer, SETUP)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in NAMES
        for path in (folder / name).iterdir()
    }


def assert_close(report: dict[str, Any], expected: dict[str, Any]) -> None:
    """The engine that served may have been compiled with more or fewer optimisations."""
    chex.assert_trees_all_close(report["held_out"], expected["held_out"], rtol=0, atol=1e-5)
    assert report["largest_difference"] < 1e-4


@pytest.mark.slow
def test_each_adapter_beats_the_others_on_its_task_and_the_engine_has_the_trainers_numbers(
    complete_run,
):
    assert [entry["step"] for entry in complete_run.losses] == [4, 8, 12]
    first, _, last = complete_run.losses
    table = complete_run.report["held_out"]
    assert list(table) == ["base", *NAMES]
    for name in NAMES:
        assert last["train"][name] < first["train"][name]
        assert last["held_out"][name] < first["held_out"][name]
        assert abs(table[name][name]["loss"] - last["held_out"][name]) < 1e-4
        assert table[name][name]["loss"] + 0.1 < min(
            table[rival][name]["loss"] for rival in table if rival != name
        )
        assert all(0 <= by_task[name]["right"] <= 1 for by_task in table.values())
    assert 0 < complete_run.report["largest_difference"] < 1e-4
    assert json.loads((complete_run.out / "log.json").read_text()) == complete_run.losses
    assert json.loads((complete_run.out / "report.json").read_text()) == complete_run.report


def test_step_0_is_the_base_which_never_changes(module, named_tasks):
    before = jax.tree.map(np.array, nnx.state(module))
    trainer = train_lora.make_trainer(SETUP, module, NAMES)
    state = trainer.start
    start = jax.tree.map(np.array, trainer.start.params)
    held_out = named_tasks["sort"].held_out
    base = trainer.logprobs(None, held_out)
    chex.assert_shape(base, held_out.tokens.shape)
    chex.assert_trees_all_equal(base, score(module, held_out.tokens, held_out.lengths))
    for name in NAMES:
        chex.assert_trees_all_equal(trainer.logprobs(state.params[name], held_out), base)
    different = [
        (a != b).any()
        for (a, _), (b, _) in zip(*(start[name].values() for name in NAMES), strict=True)
    ]
    assert all(different), "each adapter has its own A"
    for step in range(2):  # in the first step B is zero, so A has no gradient
        state, _ = trainer.update(
            state, {name: task.batch(step) for name, task in named_tasks.items()}
        )
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), start, state.params)
    assert all(jax.tree.leaves(changed)), "all factors learn"
    chex.assert_trees_all_equal(nnx.state(module), before)
    chex.assert_trees_all_equal(trainer.logprobs(None, held_out), base)


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(complete_run, model, tmp_path):
    out = tmp_path / "run"
    killed(CHILD, model, out, repr(SETUP), EVERY)
    losses, report = train_lora.train(model, out, SETUP, EVERY, say=lambda _: None)
    assert losses == complete_run.losses
    assert_close(report, complete_run.report)
    assert files(out) == files(complete_run.out)


@pytest.mark.slow
def test_some_modules_and_orbax_folders(model, module, tmp_path):
    out = tmp_path / "run"
    setup = replace(SETUP, steps=2, modules="q_proj, down_proj")
    _, report = train_lora.train(model, out, setup, 2, say=lambda _: None)
    before = [read_adapter(out / name, module.config, name) for name in NAMES]
    assert {place.matrix for adapter in before for place in adapter.parts} == {
        "attn.qkv",
        "mlp.down",
    }
    _, repeated = train_lora.train(model, out, setup, 2, to="orbax", say=lambda _: None)
    assert repeated == report
    assert {path.name for path in (out / "upper").iterdir()} == {"adapter_config.json", "params"}
    after = [read_adapter(out / name, module.config, name) for name in NAMES]
    assert [adapter.content_hash for adapter in after] == [
        adapter.content_hash for adapter in before
    ]


@pytest.mark.oracle
def test_peft_gives_the_same_log_probabilities(complete_run, model, module, named_tasks, tmp_path):
    torch, peft, transformers = (
        pytest.importorskip(name) for name in ("torch", "peft", "transformers")
    )
    base = convert(model, tmp_path / "base", to="safetensors", progress=False)
    for name in NAMES:
        held_out = named_tasks[name].held_out
        adapter = read_adapter(complete_run.out / name, module.config, name).parts
        expected = np.asarray(score(module, held_out.tokens, held_out.lengths, adapter=adapter))
        torch_model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
        torch_model = peft.PeftModel.from_pretrained(torch_model, complete_run.out / name)
        ids = torch.tensor(held_out.tokens, dtype=torch.long)
        with torch.no_grad():
            logits = torch_model(ids[:, :-1]).logits.log_softmax(-1)
        chosen = logits.gather(-1, ids[:, 1:, None])[..., 0].numpy()
        counts = held_out.has_loss[:, 1:]
        chex.assert_trees_all_close(chosen[counts], expected[:, 1:][counts], rtol=0, atol=1e-4)


# --- tasks ----------------------------------------------------------------------------------------


def test_held_out_lists_are_in_no_step_and_answers_are_pythons(loaded, named_tasks):
    decode = loaded.tokenizer.decode
    task = named_tasks["sort"]
    prompts = {decode(task.held_out.prompt(i)) for i in range(SETUP.held_out)}
    assert len(prompts) == SETUP.held_out
    trained = [task.batch(step) for step in range(40)]
    assert not prompts & {decode(batch.prompt(i)) for batch in trained for i in range(SETUP.lists)}
    for i in range(5):
        prompt = decode(task.held_out.prompt(i))
        answer = decode(task.held_out.answer(i))
        digits = ast.literal_eval(prompt.removeprefix(">>> sorted(").removesuffix(")\n"))
        assert len(set(digits)) == DIGITS
        assert (prompt, answer) == question(digits)
        assert answer == f"{sorted(digits)}\n"
        assert task.right(answer, answer)
        assert not task.right(answer, answer.replace("]", ", 1]"))


def test_capitals_are_the_documentations(loaded, named_tasks):
    task = named_tasks["upper"]
    for examples in (task.batch(3), task.held_out):
        texts = [loaded.tokenizer.decode(row) for row in examples.tokens]
        assert texts == [text.upper() for text in texts]
    assert task.batch(3).has_loss.sum() == 8 * 37
    assert task.held_out.has_loss.sum() == 8 * 26
    assert task.right("", "THE X.")
    assert not any(task.right("", text) for text in ("The x.", "...", ""))


def test_examples_depend_on_seed_and_step_alone(loaded, named_tasks):
    of_other_seed = tasks(loaded.tokenizer, replace(SETUP, seed=1))
    for name in NAMES:
        examples, repeated, later = (named_tasks[name].batch(step) for step in (3, 3, 4))
        chex.assert_trees_all_equal(examples, repeated)
        assert (examples.tokens != later.tokens).any()
        assert (examples.tokens != of_other_seed[name].batch(3).tokens).any()


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alpha", "0"], "--alpha is 0.0; it must be above 0 and finite"),
        (
            [],
            "where no config.json is; python -m experiments.training.train_tiny --out FOLDER makes one",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        train_lora.main(["--model", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--modules", "q_proj,c_attn"],
            "modules has 'c_attn'; this model has q_proj,k_proj,v_proj,o_proj,.*: use",
        ),
        (["--context", "64"], "--context is 64; this model has room for 63 tokens: lower it"),
        (["--context", "30"], "--context is 30; a list to sort has up to 38 tokens: raise it"),
        (
            ["--held-out", "9999"],
            r"--held-out is 9999; the held-out text has \d+ windows: lower it or --context",
        ),
        (
            ["--lists", "5040"],
            "--held-out is 64 and --lists 5040; there are 5040 lists: lower one of them",
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_before_anything_is_written(
    model, tmp_path, capsys, options, message
):
    words = ["--model", str(model), "--out", str(tmp_path / "out"), "--context", "40", *options]
    assert train_lora.main(words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
