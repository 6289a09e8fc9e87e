"""Claims and files of studies, and each simulated study once with --quick."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from experiments import reproduce
from experiments.analysis import figures
from experiments.studies.findings import Claim, Findings, Interval, recorded_file

SIMULATED = (
    "001",
    "002",
    "003",
    "004",
    "006",
    "007",
    "009",
    "011",
    "013",
    "014",
    "017",
    "021",
    "022",
    "023",
    "024",
    "025",
    "027",
)
LONGEST = ("013", "014", "021")  # the numbers of the documents come from whole runs


def claim(published, measured, factor=1.1, why=""):
    return Claim(
        "a paper", "a thing", published, Interval(measured, measured, measured), factor, "%", why
    )


@pytest.mark.parametrize(
    ("published", "measured", "factor", "ratio", "agrees"),
    [
        (10.0, 10.9, 1.1, 1.09, True),
        (10.0, 9.0, 1.1, 0.9, False),
        ((2.0, 8.0), 5.0, 1.0, 1.0, True),
        ((2.0, 8.0), 9.0, 1.0, 1.125, False),
        ((2.0, 8.0), 1.0, 1.1, 0.5, False),
    ],
)
def test_a_number_agrees_within_its_factor_of_the_published_one(
    published, measured, factor, ratio, agrees
):
    result = claim(published, measured, factor)
    assert result.ratio == pytest.approx(ratio)
    assert result.agrees == agrees


def test_figures_are_reproducible_svg():
    panels = {"left": {"a": [(1, 2.0), (2, 3.0)], "b": [(1, 1.0), (2, 1.0)]}}
    first, second = (figures.curves(panels, "x", "y", log_x=2, dashed=("b",)) for _ in range(2))
    assert first == second
    assert ET.fromstring(first).tag.endswith("svg")


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """A study with kept files in tmp_path/studies/042_answers, and its findings."""
    monkeypatch.setattr(reproduce, "STUDIES", tmp_path / "studies")
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    (tmp_path / "studies/042_answers").mkdir(parents=True)
    (tmp_path / "studies/042_answers/study.py").touch()
    claims = [claim(10.0, 10.5), claim((2.0, 8.0), 20.0, why="another planet")]
    findings = Findings(claims, ["It is 42."], {"a.svg": "<svg/>"}, ["| t |"])
    study = type(
        "Study",
        (),
        {"QUESTION": "What is it?", "run": staticmethod(lambda folder, quick: findings)},
    )
    monkeypatch.setattr(reproduce.importlib, "import_module", lambda name: study)
    return findings


def test_findings_are_written_and_read_back(tmp_path, answers, monkeypatch):
    assert reproduce.main(["042"]) == 0
    folder = tmp_path / "studies/042_answers"
    saved = json.loads((folder / "findings.json").read_text())
    assert reproduce.claims_of(saved) == answers.claims
    text = (folder / "README.md").read_text()
    for part in ("What is it?", "It is 42.", "![a.svg](a.svg)", "no: another planet"):
        assert part in text
    table = (tmp_path / "REPRODUCTION.md").read_text()
    assert "1 of 2 published numbers agree" in table
    assert "(experiments/studies/042_answers/README.md)" in table
    assert f", {reproduce.usable_cores()} cores; commit " in table
    assert (folder / "a.svg").read_text() == "<svg/>"


def test_quick_or_out_leaves_kept_files_unchanged(tmp_path, answers, monkeypatch):
    assert reproduce.main(["042"]) == 0
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    for place, *options in (
        ("elsewhere", "--out", str(tmp_path / "elsewhere")),
        (reproduce.QUICK, "--quick"),
    ):
        assert reproduce.main(["042", *options]) == 0
        table = (tmp_path / place / "REPRODUCTION.md").read_text()
        assert "](042_answers/README.md)" in table
        assert ("--quick: too few requests" in table) == ("--quick" in options)
        assert (tmp_path / place / "042_answers/a.svg").is_file()
    assert {path: path.read_bytes() for path in contents} == contents


def test_unwritable_out_folder_fails_before_anything_runs(tmp_path, answers, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "run", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    for out, message in (
        (tmp_path / "file", "which cannot be created"),
        (tmp_path, "the folder of the kept results; give another folder"),
    ):
        assert reproduce.main(["042", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("published", "text", "weak"),
    [
        ((1.0, 1000.0), "at least 1 x", True),
        ((0.0, 9.0), "at most 9 x", True),
        ((1.0, 28.3), "1 to 28.3 x (wide)", True),
        ((1.0, 3.0), "1 to 3 x", False),
        (2.0, "2 x", False),
    ],
)
def test_claim_row_says_how_much_a_published_range_claims(published, text, weak):
    result = Claim("a paper", "a thing", published, Interval(1.9, 2.1, 2.3, n=3), 1.25, "x")
    cells = reproduce.row(result)[2:]
    assert cells[:2] == [text, "2.1 (1.9 to 2.3, n = 3) x"]
    assert cells[3:] == ["1.25 x", "yes"]
    assert reproduce.weak(result) == weak


def test_unknown_study_is_an_error(capsys):
    assert reproduce.main(["003", "777"]) == 2
    assert "there is no study '777'; there are 001_block_size" in capsys.readouterr().err


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5,{100 + 37 * i % 900},{1 + i % 7}\n"
    for i in range(900)
)


def test_trace_study_reads_given_folder(tmp_path):
    (name,) = reproduce.choose(["012"])
    for kind in ("conv", "code"):
        (tmp_path / f"a_{kind}_trace.csv").write_text(TRACE, encoding="utf-8")
    study = reproduce.module(name)
    file = recorded_file(tmp_path, "*conv*.csv", study.FETCH)
    runs = study.windows(reproduce.STUDIES / name, file, True, "workload.offset=0")
    assert {(policy, rate) for policy, rate in runs} == {
        (p, r) for p in ("fcfs", "shortest") for r in (1.0, 2.0)
    }
    assert all(run["requests"] == 200 for group in runs.values() for run in group)


def test_trace_study_without_traces_keeps_its_findings(capsys, tmp_path):
    findings = (reproduce.STUDIES / "012_recorded_load" / reproduce.FINDINGS).read_bytes()
    assert reproduce.main(["012", "--out", str(tmp_path / "out")]) == 0
    assert (
        "012_recorded_load: keeps its last findings; it needs --traces FOLDER"
        in capsys.readouterr().err
    )
    assert (reproduce.STUDIES / "012_recorded_load" / reproduce.FINDINGS).read_bytes() == findings
    assert reproduce.main(["012", "--traces", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "there is no *conv*.csv in the folder of --traces" in capsys.readouterr().err


def test_kept_findings_are_full_runs_and_in_reproduction_table():
    """Committed findings are of full runs, and REPRODUCTION.md agrees with the studies' files."""
    findings = [
        json.loads((reproduce.STUDIES / name / reproduce.FINDINGS).read_text())
        for name in reproduce.names()
    ]
    assert not [finding["name"] for finding in findings if finding["quick"]]
    assert (reproduce.STUDIES.parents[1] / "REPRODUCTION.md").read_text() == reproduce.reproduction(
        findings
    )
    for finding in findings:
        assert (reproduce.STUDIES / finding["name"] / "README.md").read_text() == reproduce.readme(
            finding
        )


def test_memory_shares_match_paper():
    """With few requests like ShareGPT's; the result depends on the scheduler only."""
    (name,) = reproduce.choose(["003"])
    study = reproduce.module(name)
    sizes = (*study.lengths.overrides("ShareGPT"), "workload.count=100")
    points = study.results_of(reproduce.STUDIES / name / "config.yaml", *sizes, repeats=1)
    tokens = {}
    for point, [(limits, results)] in points:
        tokens[point.experiment.engine.reservation] = study.shares(results, limits)["tokens"]
    assert tokens == pytest.approx(
        {kind: shares[0] for kind, shares in study.SHARES.items()}, rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.exhaustive) if number in LONGEST else number
        for number in SIMULATED
    ],
)
def test_simulated_study_runs_quick(number):
    (name,) = reproduce.choose([number])
    findings = reproduce.run(name, quick=True)
    assert findings["answer"]
    assert findings["svg"]
    assert all(
        claim["ours"].low <= claim["ours"].middle <= claim["ours"].high
        for claim in findings["claims"]
    )
