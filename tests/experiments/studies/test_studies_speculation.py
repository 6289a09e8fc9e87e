"""Studies of speculative decoding: their formulas, the recorded format, and 016 on a tiny model."""

from __future__ import annotations

import importlib
import json

import pytest

from experiments import reproduce
from experiments.simulation.cost import Work
from experiments.studies import fitted_h100
from experiments.studies.findings import Interval

draft_acceptance = importlib.import_module("experiments.studies.013_draft_acceptance.study")
batches = importlib.import_module("experiments.studies.014_speculation_batch.study")
recorded = importlib.import_module("experiments.studies.015_recorded_acceptance.study")
measured = importlib.import_module("experiments.studies.016_speculation_measured.study")
oracle = importlib.import_module("experiments.studies.016_speculation_measured.oracle")
STUDIES = reproduce.STUDIES


# 013 ----------------------------------------------------------------------------------------------


def test_published_table_is_that_of_the_formulas():
    for setting, (faster, operations) in draft_acceptance.TABLE_1.items():
        tokens = draft_acceptance.tokens_a_step(setting)
        assert faster == pytest.approx(tokens, abs=0.006)
        assert operations == pytest.approx((setting.drafts + 1) / tokens, abs=0.006)
        assert draft_acceptance.factor(setting) == tokens
    costly = draft_acceptance.Setting(0.5, 1, 0.5)
    assert draft_acceptance.factor(costly) == pytest.approx(1.5 / 1.5)


def test_certain_drafts_are_counted_by_hand():
    """Of 8,000 tokens, the first has no drafts; each later step gives 4, and the last 3."""
    folder = STUDIES / "013_draft_acceptance"
    setting = draft_acceptance.Setting(1.0, 3, 0.5)
    steps = 1 + 2000
    run = draft_acceptance.run_requests(folder, setting, 1)
    seconds = steps + 0.5 * (3 * 1999 + 2)
    assert run.faster.middle == pytest.approx(8000 / seconds)
    assert run.operations == pytest.approx(1.0)
    assert draft_acceptance.run_requests(folder, None, 1).faster.middle == pytest.approx(1.0)


def test_rates_are_taken_over_that_of_plain_decoding():
    run = draft_acceptance.Run(Interval(2.0, 4.0, 6.0, n=3), 1.5)
    assert draft_acceptance.over(run, 2.0) == (Interval(1.0, 2.0, 3.0, n=3), 1.5)


# 014 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "batch"),
    [
        ([(1, 2.0), (4, 1.5), (16, 0.5)], 8.0),  # halfway in logarithms
        ([(1, 2.0), (4, 1.0), (16, 0.5)], 4.0),
        ([(1, 0.9), (4, 1.5), (16, 1.2)], None),
        ([(1, 0.9), (4, 0.8)], 1),
        ([(1, 1.5), (2, 0.9), (4, 1.1), (16, 0.9)], 8.0),  # the last one counts
    ],
)
def test_crossing_of_a_line(line, batch):
    assert batches.crossing(line) == (batch if batch is None else pytest.approx(batch))


def test_claims_are_ranges_over_likely_acceptances():
    by_setting = {
        batches.Setting(cost, batch, a): a
        for cost in batches.COSTS
        for batch in batches.SOURCES
        for a in batches.LIKELY
    }
    claims = batches.claims_of(by_setting)
    assert len(claims) == len(batches.COSTS) * len(batches.SOURCES)
    assert all(claim.ours[:4] == (0.6, pytest.approx(0.7), 0.8, "range") for claim in claims)
    assert all(claim.why for claim in claims)


# 015 ----------------------------------------------------------------------------------------------


def line_of(eagle, ngram, prompt=5, **fields):
    row = {
        "prompt_token_ids": [1] * prompt,
        "acc_eagle": {"acc_len": eagle},
        "acc_ngram": {"acc_len": ngram},
    }
    return json.dumps(row | fields)


def test_recorded_request_is_read(tmp_path):
    file = tmp_path / recorded.TRACES["gsm8k"]
    file.write_text(
        "\n".join([line_of([4, 3, 2, 1], [1, 1, 2, 1]), line_of([2], [1])]), encoding="utf-8"
    )
    first, second = recorded.read(tmp_path, "gsm8k", 5)
    assert first == (5, {"eagle": (4, 3, 2, 1), "ngram": (1, 1, 2, 1)})
    assert second.gains["eagle"] == (2,)
    assert len(recorded.read(tmp_path, "gsm8k", 1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{",
            "f, line 2: JSONDecodeError .* must be a JSON object with prompt_token_ids, acc_eagle.acc_len",
        ),
        ("[]", "f, line 2: TypeError"),
        (
            line_of([1, 0], [1]),
            "acc_eagle.acc_len has 0; a step gives at least 1 token. Fetch combined_gsm8k.jsonl",
        ),
        (line_of([1], []), "acc_ngram.acc_len is empty"),
    ],
)
def test_wrong_recorded_line_is_named(line, message):
    with pytest.raises(ValueError, match=message):
        recorded.request(line, "f, line 2")


def test_step_time_by_hand():
    plain = Work(tokens=2, sequences=2, sampled=2, context=1000, pairs=0)
    step = 5.88590713e-3 + 2 * 2.10103129e-5 + 1000 * 3.92645679e-8
    assert (
        fitted_h100.seconds(plain, None)
        == fitted_h100.seconds(plain, "eagle")
        == pytest.approx(step)
    )
    drafts = plain._replace(tokens=8, sampled=8)
    step += 6 * 2.10103129e-5
    assert fitted_h100.seconds(drafts, "ngram") == pytest.approx(1.005875 * step)
    eagle = 2.13526175e-3 + 4 * 8.41429603e-7 + 1000 * 2.37768493e-9
    assert fitted_h100.seconds(drafts, "eagle") == pytest.approx(step + eagle)


def test_recorded_gains_decide_the_steps():
    """Of 9 tokens: 1 with the prompt, then 4 (its 5 are more than 3 drafts and one), 1, and 3 to
    the end.
    """
    records = [recorded.Recorded(5, {"eagle": (5, 9, 9, 9, 1, 3, 9, 9, 9)})]
    engine = recorded.engine(
        STUDIES / "015_recorded_acceptance", recorded.Setting("gsm8k", "eagle", 2), records
    )
    (rate,) = recorded.rates(engine, records, "eagle", 2)
    steps = engine.scheduler_state.step
    assert steps == 4
    assert rate == pytest.approx(2 * 9 / engine.now)


def test_unmatched_ngram_has_no_drafts():
    never, always = (
        recorded.recorded_guesses([recorded.Recorded(5, {"ngram": (1, 3)})], "ngram", share)
        for share in (0.0, 1.0)
    )
    seq = type("Seq", (), {"request_id": "0-1", "arrival": 1})
    assert (never(seq, 6, 3), always(seq, 6, 3)) == ((0, 0), (3, 0))
    assert never(seq, 7, 3) == (3, 2)


def test_recorded_study_on_synthetic_files(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "BATCHES", (1, 4))
    for name in recorded.TRACES.values():
        text = "\n".join(line_of([4] * 20, [1] * 20, prompt=8 + i) for i in range(3))
        (tmp_path / name).write_text(text, encoding="utf-8")
    findings = recorded.run(STUDIES / "015_recorded_acceptance", True, tmp_path)
    assert len(findings.claims) == 8
    eagle, ngram = (
        next(c for c in findings.claims if name in c.what and "batch 1" in c.what)
        for name in ("eagle", "ngram")
    )
    assert eagle.ours.middle > 1.5
    assert 0.9 < ngram.ours.middle < 1.0, "no draft is right"


def test_all_studies_go_on_without_recorded_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        reproduce, "names", lambda: ["012_recorded_load", "015_recorded_acceptance"]
    )
    options = ["--traces", str(tmp_path), "--out", str(tmp_path / "out")]
    assert reproduce.main(options) == 0
    errors = capsys.readouterr().err
    assert "012_recorded_load: keeps its last findings; there is no *conv*.csv" in errors
    assert (
        "015_recorded_acceptance: keeps its last findings; there is no combined_gsm8k.jsonl"
        in errors
    )
    assert reproduce.main(["015", *options]) == 2
    assert "error: there is no combined_gsm8k.jsonl" in capsys.readouterr().err


# 016 ----------------------------------------------------------------------------------------------


def test_oracle_errs_as_often_as_asked():
    output = list(range(500))
    for acceptance in (0.0, 0.8, 1.0):
        memory = {"acceptance": acceptance, "outputs": {"3": (4, output)}}
        drafts = oracle.propose(memory, "3", [0] * 4, 500)
        assert all(draft >= 0 for draft in drafts)
        right = sum(a == b for a, b in zip(drafts, output, strict=True))
        assert right / 500 == pytest.approx(acceptance, abs=0.05)
        assert oracle.propose(memory, "3", [0] * 14, 7) == drafts[10:17], "a position has one draft"
    assert oracle.propose(memory, "3", [0] * 503, 7) == [499], "nothing beyond the end"


@pytest.mark.slow
def test_measured_study_on_tiny_model(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "DEFAULT_MODEL", str(tiny_folder))
    monkeypatch.setattr(measured, "QUICK", measured.Size((2,), (1.0,), 24, 1))
    monkeypatch.setattr(measured, "BUDGET", 32)
    monkeypatch.setattr(measured, "PROMPT", 16)
    monkeypatch.setattr(measured, "expected_tokens", lambda acceptance: 4.0)
    findings = measured.run(tmp_path, quick=True)
    (claim,) = findings.claims
    assert claim.ours.middle == pytest.approx(1 + (3 * 5 + 2) / 6), (
        "23 tokens after the first: 5 x 4 and 3"
    )


def test_expected_tokens_of_a_step():
    assert measured.expected_tokens(0.5) == pytest.approx(1.875)
