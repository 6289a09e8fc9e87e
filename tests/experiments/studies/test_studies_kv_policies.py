"""Study 018: its formulas, and the study on a tiny model."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.rope import Rope
from pagedjax.host import kv_policies
from pagedjax.options.config import KVPolicyOptions

study = importlib.import_module("experiments.studies.018_kv_policies.study")
timed = importlib.import_module("experiments.studies.018_kv_policies.timed")


@pytest.mark.parametrize("sinks", [0, 4, 8])
@pytest.mark.parametrize("tokens", [64, 128, 512])
def test_streaming_sees_so_many_tokens_at_most(tokens, sinks):
    options = study.streaming(tokens, sinks)
    policy = kv_policies.find(KVPolicyOptions(**options["kv_policy"]))
    view = kv_policies.view(policy, options["block_size"], 1000)
    assert view.width(1000) * options["block_size"] == tokens


def test_a_selection_reads_bounds_of_all_blocks_and_keys_and_values_of_some():
    """Quest, section 3.4: 1 / 16 of the bytes, and 4,096 of 65,536 tokens."""
    assert study.bytes_read(65536, 4096) == pytest.approx(1 / (1 / 16 + 4096 / 65536))


def test_a_pass_key_prompt_has_its_length_and_the_key_twice():
    def encode(text):
        return [ord(c) for c in text]

    for seed in range(5):
        prompt, key = study.pass_key(encode, 400, random.Random(seed))
        assert len(prompt) == 400
        text = "".join(map(chr, prompt))
        assert text.count(key) == 2
        assert text.startswith(study.HEAD)
        assert text.endswith(study.TAIL)


@pytest.mark.slow
def test_timed_attention_with_all_blocks_is_full_attention():
    shape = DecoderConfig(8, 8, 8, 4, 2, 8, 256, True, 1e-5, (LayerKind(),), (Rope(1e4),))
    model = SimpleNamespace(config=shape)
    results = {}
    for tokens in (64, 32):
        contenders = timed.contenders(model, "xla", 2, 64, tokens)
        results[tokens] = {name: np.asarray(contender()) for name, contender in contenders.items()}
    chex.assert_shape(results[64]["full"], (2, 4, 8))
    chex.assert_trees_all_close(results[64]["selected"], results[64]["full"], atol=1e-5)
    assert np.abs(results[32]["selected"] - results[32]["full"]).max() > 1e-2


@pytest.mark.slow
def test_kv_policies_study_on_tiny_model(tmp_path, monkeypatch):
    from tests.weights.tiny import tiny_llama

    folder = tiny_llama(tmp_path / "model", layers=3, tied=False)
    size = study.Size(2, 64, (16, 32), 16, 3, 2, 300, (32,), (64, 128), 2, 2, 32)
    for name, value in {"DEFAULT_MODEL": str(folder), "QUICK": size}.items():
        monkeypatch.setattr(study, name, value)
    findings = study.run(tmp_path, quick=True)
    assert len(findings.claims) == 7
    assert all(claim.ours.low <= claim.ours.middle <= claim.ours.high for claim in findings.claims)
    assert [claim.agrees for claim in findings.claims][5], "bytes are exact"
    perplexities, *_ = findings.tables
    assert perplexities.splitlines()[2].endswith("| 1.000 (1.000 to 1.000) |")
    assert sorted(findings.figures) == ["perplexity.svg"]
