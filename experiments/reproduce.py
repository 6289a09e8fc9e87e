"""Reproduces published results.

    python -m experiments.reproduce [003 009 ...] [--quick] [--traces FOLDER]

Runs the studies of experiments/studies and writes README.md, figures and findings.json into the
folder of each, and REPRODUCTION.md: every published number, our number with its interval, their
ratio, and whether they agree or why not. Without names all studies run, in about 90 minutes on two cores
(REPRODUCTION.md). Studies that do not run keep their last findings. Studies of recorded traces
(012, 015, 020, 026, 030) need --traces, which this repository does not have; without it, their
findings stay.

--out FOLDER writes everything below FOLDER and leaves the kept files unchanged. So does --quick,
whose numbers are no result: without --out it writes to runs/reproduction.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.core.environment import cpu_model, git_state, usable_cores
from experiments.core.optional_imports import require
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    NoTraces,
    markdown,
    rounded,
    times,
)

STUDIES = Path(__file__).parent / "studies"
ROOT = Path(__file__).parents[1]
FINDINGS = "findings.json"
TABLE = "REPRODUCTION.md"
QUICK = "runs/reproduction"  # where --quick writes without --out
WIDE_RANGE_RATIO = 10.0  # a published range is weak evidence if high / low is above this
ONE_SIDED = 100.0  # a range is printed as "at least LOW" if high / low is at least this
HEAD = """# Reproduction

Written by `python -m experiments.reproduce`, with all results, disagreements included. *Ours* is one number if nothing
is random. Otherwise it is a mean with its 95 % interval, Student's t over n seeds (on logarithms if all values are
above zero), or the range of the measured values if the row says *range*. *Agrees* means that ours is within the factor
of column *within* of the published number, or of the nearer end of a published range; if not, the reason follows. *At
least* and *at most* are published ranges of which one end is meant. Simulated times come from a roofline of the chip
and model that the source used ([cost.py](experiments/simulation/cost.py)), so ratios are those of ideal hardware use.
"""


def names() -> list[str]:
    """The studies' folders, in order."""
    return sorted(folder.name for folder in STUDIES.iterdir() if (folder / "study.py").is_file())


def choose(words: Sequence[str]) -> list[str]:
    """The folders of studies, by their numbers or names; all folders if no word is given.

    Raises:
        ValueError: there is no such study.
    """
    studies = names()
    if not words:
        return studies
    folders = []
    for word in words:
        matches = [name for name in studies if word in (name, name.split("_")[0])]
        if not matches:
            raise ValueError(f"there is no study {word!r}; there are {', '.join(studies)}")
        folders.append(matches[0])
    return folders


def module(name: str) -> Any:
    """The module of a study, by the name of its folder. It has `QUESTION` and `run`."""
    return importlib.import_module(f"experiments.studies.{name}.study")


def run(name: str, quick: bool, traces: Path | None = None) -> dict[str, Any]:
    """Run a study and return its findings as plain JSON values.

    `traces`: the folder of recorded files, for studies that have the name `TRACES`.
    """
    study = module(name)
    started = time.perf_counter()
    reads_traces = hasattr(study, "TRACES")
    options = {"traces": traces} if reads_traces else {}
    findings: Findings = study.run(STUDIES / name, quick, **options)
    return {
        "name": name,
        "question": study.QUESTION,
        "claims": [claim._asdict() for claim in findings.claims],
        "answer": findings.answer,
        "tables": list(findings.tables),
        "figures": sorted(findings.figures),
        "seconds": round(time.perf_counter() - started, 1),
        "quick": quick,
        "traces": reads_traces,
        "commit": (git_state(STUDIES)["commit"] or "unknown")[:7],
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "svg": dict(findings.figures),
    }


def write(findings: dict[str, Any], folder: Path) -> None:
    """Write a study's folder: figures, findings.json, README.md.

    Removes "svg", the figures' texts, from `findings`.
    """
    folder.mkdir(exist_ok=True)
    for name, svg in findings.pop("svg").items():
        (folder / name).write_text(svg, encoding="utf-8")
    (folder / FINDINGS).write_text(
        json.dumps(findings, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    (folder / "README.md").write_text(readme(findings), encoding="utf-8")


def readme(findings: dict[str, Any]) -> str:
    number, _, title = findings["name"].partition("_")
    parts = [
        f"# {number} {title.replace('_', ' ')}",
        findings["question"],
        "## Answer",
        *findings["answer"],
    ]
    parts += [f"![{name}]({name})" for name in findings["figures"]]
    parts += [table(findings), *findings["tables"], "## Command"]
    command = f"python -m experiments.reproduce {number}"
    if findings["traces"]:
        command += " --traces FOLDER"
    if findings["quick"]:
        command += " --quick"
    parts += [f"```sh\n{command}\n```"]
    parts += [
        f"{findings['seconds']:.0f} s on {machine(findings)}, {findings['date']}, commit "
        f"{findings['commit']}."
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine(findings: dict[str, Any]) -> str:
    """The machine of a study, in words. Old findings have no number of cores."""
    if findings.get("cores"):
        return f"{findings['cpu']}, {findings['cores']} cores"
    return findings["cpu"]


def claims_of(findings: dict[str, Any]) -> list[Claim]:
    """The claims in a findings.json. A published range is a list there, and a tuple in a claim."""
    claims = []
    for values in findings["claims"]:
        published = values["published"]
        if isinstance(published, list):
            published = tuple(published)
        interval = Interval(*values["ours"])
        claims.append(Claim(**values | {"ours": interval, "published": published}))
    return claims


def table(findings: dict[str, Any]) -> str:
    """The claims of a study as a table of Markdown; "" if the study has no claim."""
    claims = claims_of(findings)
    head = ("source", "what", "published", "ours", "ratio", "within", "agrees")
    return markdown(head, map(row, claims)) if claims else ""


def row(claim: Claim) -> list[str]:
    """The cells of a claim in the table: source, what, published, ours, ratio, within, agrees."""
    interval = claim.ours
    unit = f" {claim.unit}" if claim.unit else ""
    text = rounded(interval.middle)
    if interval.low < interval.high:
        span = f"{rounded(interval.low)} to {rounded(interval.high)}"
        if interval.kind == "range":
            span = f"range {span}"
        text += f" ({span}, n = {interval.n})" if interval.n else f" ({span})"
    verdict = "yes" if claim.agrees else f"no: {claim.why or 'not explained'}"
    return [
        claim.source,
        claim.what,
        published_text(claim),
        text + unit,
        times(claim.ratio),
        f"{claim.factor:g} x",
        verdict,
    ]


def published_text(claim: Claim) -> str:
    """The published number or range as text; for a range with one meaningful end, that end."""
    low, high = claim.range
    unit = f" {claim.unit}" if claim.unit else ""
    if low == high:
        return f"{rounded(low)}{unit}"
    if low <= 0:
        return f"at most {rounded(high)}{unit}"
    if high >= ONE_SIDED * low:
        return f"at least {rounded(low)}{unit}"
    text = f"{rounded(low)} to {rounded(high)}{unit}"
    return f"{text} (wide)" if high > WIDE_RANGE_RATIO * low else text


def weak(claim: Claim) -> bool:
    """Whether agreement is weak evidence: the published range is wide, or only one end is meant."""
    low, high = claim.range
    return low != high and (low <= 0 or high > WIDE_RANGE_RATIO * low)


def reproduction(
    all_findings: Sequence[dict[str, Any]], studies: str = "experiments/studies/"
) -> str:
    """The text of REPRODUCTION.md; `studies` is the path from it to the studies' folders."""
    claims = [claim for findings in all_findings for claim in claims_of(findings)]
    agreeing = [claim for claim in claims if claim.agrees]
    parts = [
        HEAD.rstrip(),
        f"{len(agreeing)} of {len(claims)} published numbers agree, {sum(map(weak, agreeing))} of "
        "them with a range that is wide or has one end.",
    ]
    for findings in all_findings:
        number, _, title = findings["name"].partition("_")
        link = f"[{number} {title.replace('_', ' ')}]({studies}{findings['name']}/README.md)"
        quick = ""
        if findings["quick"]:
            quick = " (--quick: too few requests and seeds to be a result)"
        parts += [
            f"## {link}{quick}",
            findings["question"],
            " ".join(findings["answer"]),
            table(findings),
        ]
    total = sum(findings["seconds"] for findings in all_findings)
    commits = sorted({findings["commit"] for findings in all_findings})
    machines = sorted({machine(findings) for findings in all_findings})
    parts += [
        f"In all {total / 60:.0f} minutes on {' and '.join(machines)}; commit {', '.join(commits)}."
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def place_of(out: str | None, quick: bool) -> Path | None:
    """The folder to write to, which is created; None for the kept files.

    Raises:
        ValueError: the folder cannot be created, or is that of the kept files.
    """
    if out is None and not quick:
        return None
    place = Path(out or QUICK)
    if place.resolve() in (STUDIES.resolve(), ROOT.resolve()):
        raise ValueError(
            f"--out is {place}, the folder of the kept results; give another folder, or leave it "
            "out"
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out is {place}, which cannot be created ({error}); give a folder"
        ) from None
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reproduce",
        description="Reproduce published results.",
        allow_abbrev=False,
    )
    parser.add_argument("studies", nargs="*", help="numbers or names of studies (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests and seeds, as a test of the program"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="folder of the recorded files of studies 012, 015, 020, 026, 029 and 030",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"write to this folder, not to the kept files (default with --quick: {QUICK})",
    )
    options = parser.parse_args(arguments)
    require("matplotlib")
    try:
        studies = choose(options.studies)
        place = place_of(options.out, options.quick)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folders = place or STUDIES
    for name in studies:
        if hasattr(module(name), "TRACES") and options.traces is None:
            print(
                f"{name}: keeps its last findings; it needs --traces FOLDER. {module(name).FETCH}",
                file=sys.stderr,
            )
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            findings = run(name, options.quick, options.traces)
        except ValueError as error:
            if isinstance(error, NoTraces) and not options.studies:
                print(f"{name}: keeps its last findings; {error}", file=sys.stderr)
                continue
            print(f"error: {error}", file=sys.stderr)
            return 2
        write(findings, folders / name)
        print(f"{table(findings)}\n{findings['seconds']:.0f} s\n", flush=True)
    files = [folders / name / FINDINGS for name in names()]
    all_findings = [
        json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()
    ]
    # studies that did not run are written too: the text around their numbers may have changed
    for findings in all_findings:
        (folders / findings["name"] / "README.md").write_text(readme(findings), encoding="utf-8")
    file = (place or ROOT) / TABLE
    text = reproduction(all_findings, "" if place else "experiments/studies/")
    file.write_text(text, encoding="utf-8")
    print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
