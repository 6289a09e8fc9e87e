"""The field's results, reproduced: python -m experiments.reproduce [003 009 ...] [--quick] [--traces FOLDER]

Runs the studies of experiments/studies, writes each one's README.md, figures and findings.json into its folder, and
REPRODUCTION.md: every published number, ours with its interval, their ratio, and whether they agree or why not. Without
names it runs all of them, in under half an hour on two cores; with names the others keep what they found last. So does
the study of recorded traces (012) without --traces: the traces are not ours to ship.
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

from experiments import require
from experiments.environment import cpu_model, git_state
from experiments.studies.findings import Claim, Findings, Interval, markdown, told
from experiments.workloads import AZURE

STUDIES = Path(__file__).parent / "studies"
FINDINGS = "findings.json"
HEAD = """# Reproduction

Written by `python -m experiments.reproduce`; every line is what came out, disagreements included. *Ours* is a mean over
seeds with its 95 % interval, or a single count where nothing is random. *Agrees* means within the factor that the study
states for the number; where it does not, the reason is beside it. Simulated times come from a roofline of the chip and
model that the source used ([experiments/cost.py](experiments/cost.py)), so they are ratios of what hardware could do.
"""


def names() -> list[str]:
    """The studies' folders, in order."""
    return sorted(folder.name for folder in STUDIES.iterdir() if (folder / "study.py").is_file())


def chosen(wanted: Sequence[str]) -> list[str]:
    """Folders by their numbers or names. Raises ValueError for what is neither."""
    known = names()
    found = [[name for name in known if name.split("_")[0] == one or name == one] for one in wanted]
    unknown = [one for one, match in zip(wanted, found, strict=True) if not match]
    if unknown:
        raise ValueError(f"there is no study {unknown[0]!r}; there are {', '.join(known)}")
    return [match[0] for match in found] if wanted else known


def module(name: str) -> Any:
    return importlib.import_module(f"experiments.studies.{name}.study")


def run(name: str, quick: bool, traces: Path | None = None) -> dict[str, Any]:
    """Run a study; what it found, as JSON has it. `traces` is for those that have `TRACES`."""
    study = module(name)
    began = time.perf_counter()
    recorded = {"traces": traces} if hasattr(study, "TRACES") else {}
    findings: Findings = study.run(STUDIES / name, quick, **recorded)
    return {
        "name": name,
        "question": study.QUESTION,
        "claims": [claim._asdict() for claim in findings.claims],
        "answer": findings.answer,
        "tables": list(findings.tables),
        "figures": sorted(findings.figures),
        "seconds": round(time.perf_counter() - began, 1),
        "quick": quick,
        "traces": bool(recorded),
        "commit": (git_state(STUDIES)["commit"] or "unknown")[:7],
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
    } | {"svg": dict(findings.figures)}


def write(found: dict[str, Any], folder: Path) -> None:
    """A study's folder: figures, findings.json, README.md."""
    for name, svg in found.pop("svg").items():
        (folder / name).write_text(svg, encoding="utf-8")
    (folder / FINDINGS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(readme(found), encoding="utf-8")


def readme(found: dict[str, Any]) -> str:
    number, _, title = found["name"].partition("_")
    parts = [f"# {number} {title.replace('_', ' ')}", found["question"], "## Answer", *found["answer"]]
    parts += [f"![{name}]({name})" for name in found["figures"]]
    parts += [table(found["claims"]), *found["tables"], "## Command"]
    traces = " --traces FOLDER" if found["traces"] else ""
    parts += [f"```sh\npython -m experiments.reproduce {number}{traces}\n```"]
    quick = ", with --quick" if found["quick"] else ""
    parts += [f"{found['seconds']:.0f} s on {found['cpu']}, {found['date']}, commit {found['commit']}{quick}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def claims_of(found: dict[str, Any]) -> list[Claim]:
    """Back from JSON, which has lists where we have tuples."""

    def back(claim: dict[str, Any]) -> Claim:
        published = claim["published"]
        published = tuple(published) if isinstance(published, list) else published
        return Claim(**claim | {"ours": Interval(*claim["ours"]), "published": published})

    return [back(claim) for claim in found["claims"]]


def table(kept: Sequence[dict[str, Any]]) -> str:
    claims = claims_of({"claims": kept})
    return markdown(("source", "what", "published", "ours", "ratio", "agrees"), map(row, claims)) if claims else ""


def row(claim: Claim) -> list[str]:
    low, high = claim.range
    published = told(low) if low == high else f"{told(low)} to {told(high)}"
    ours = told(claim.ours.middle)
    if claim.ours.low < claim.ours.high:
        ours += f" ({told(claim.ours.low)} to {told(claim.ours.high)})"
    unit = f" {claim.unit}" if claim.unit else ""
    verdict = "yes" if claim.agrees else f"no: {claim.why or 'not explained'}"
    return [claim.source, claim.what, published + unit, ours + unit, f"{claim.ratio:.2f}", verdict]


def reproduction(all_found: Sequence[dict[str, Any]]) -> str:
    """REPRODUCTION.md."""
    claims = [claim for found in all_found for claim in claims_of(found)]
    agreeing = sum(claim.agrees for claim in claims)
    parts = [HEAD.rstrip(), f"{agreeing} of {len(claims)} published numbers agree."]
    for found in all_found:
        number, _, title = found["name"].partition("_")
        link = f"[{number} {title.replace('_', ' ')}](experiments/studies/{found['name']}/README.md)"
        parts += [f"## {link}", found["question"], " ".join(found["answer"]), table(found["claims"])]
    total = sum(found["seconds"] for found in all_found)
    commits = sorted({found["commit"] for found in all_found})
    where = sorted({found["cpu"] for found in all_found})
    parts += [f"In all {total / 60:.0f} minutes on {', '.join(where)}, two cores; commit {', '.join(commits)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.reproduce", description="Reproduce published results.")
    parser.add_argument("studies", nargs="*", help="numbers or names of studies; all of them without")
    parser.add_argument("--quick", action="store_true", help="fewer requests and seeds: to see that all of it runs")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="with the CSV files of the Azure LLM traces of 2023"
    )
    parser.add_argument("--out", default="REPRODUCTION.md", help="the table of all studies")
    options = parser.parse_args(arguments)
    require("matplotlib")
    try:
        wanted = chosen(options.studies)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in wanted:
        if hasattr(module(name), "TRACES") and options.traces is None:
            print(f"{name}: keeps what it found last; it takes --traces FOLDER. {AZURE}", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = run(name, options.quick, options.traces)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        write(found, STUDIES / name)
        print(f"{table(found['claims'])}\n{found['seconds']:.0f} s\n", flush=True)
    kept = [STUDIES / name / FINDINGS for name in names()]
    every = [json.loads(file.read_text(encoding="utf-8")) for file in kept if file.is_file()]
    Path(options.out).write_text(reproduction(every), encoding="utf-8")
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
