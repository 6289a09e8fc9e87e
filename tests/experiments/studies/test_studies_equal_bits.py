"""Study 028: what it counts, and its run on a tiny model."""

from __future__ import annotations

import importlib

import pytest

equal_bits = importlib.import_module("experiments.studies.028_equal_bits.study")
ALIKE = [(1, 2, 3), (1, 2, 3), (1, 2, 3)]
APART = [(1, 2, 3), (1, 2, 4), (1, 5, 4)]


def test_the_first_difference_is_where_not_all_answers_have_one_token():
    assert equal_bits.first_difference(ALIKE) is None
    assert equal_bits.first_difference(APART) == 1


def test_claims_need_many_answers_without_the_mode_and_one_with_it():
    distances = {
        "ordinary": equal_bits.Distance(2e-3, 0.1),
        "batch-invariant": equal_bits.Distance(0.0, 0.0),
    }
    claims = equal_bits.claims_of({"ordinary": APART, "batch-invariant": ALIKE}, distances)
    assert [claim.agrees for claim in claims] == [True] * 4
    turned = dict(zip(distances, reversed(distances.values()), strict=True))
    claims = equal_bits.claims_of({"ordinary": ALIKE, "batch-invariant": APART}, turned)
    assert [claim.agrees for claim in claims] == [False] * 4


@pytest.mark.slow
@pytest.mark.optimised
def test_the_study_on_a_tiny_model(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(equal_bits, "DEFAULT_MODEL", str(tiny_folder))
    monkeypatch.setattr(equal_bits, "prompt_of", lambda llm, size: [7] * size.prompt)
    findings = equal_bits.run(tmp_path, quick=True)
    _, one_answer, _, no_distance = findings.claims
    assert one_answer.agrees
    assert no_distance.agrees
