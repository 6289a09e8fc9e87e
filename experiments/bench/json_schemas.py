"""Which JSON schemas can be asked for, and do their masks accept what is valid and nothing else?

    python -m experiments.bench.json_schemas FOLDER [--limit 500] [--model smollm2-135m] [--json out.json]

FOLDER has MaskBench's files (guidance-ai/jsonschemabench, `maskbench/data`): each is {"schema":
..., "tests": [{"valid": ..., "data": ...}]}. A file that is a schema itself, as in JSONSchemaBench,
is compiled and has no instances.

Each instance is written as compact JSON and followed token by token through the masks that the
engine uses.

    refused            schemas that cannot be compiled; a user gets an error that names the keyword
    valid rejected     instances that must pass and do not; among them those whose properties are in another order
    invalid accepted   instances that must fail and pass: each would be a wrong answer
    mask               milliseconds of one mask, at the median, the 99th percentile and at most
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import bench_parser, write_report
from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.structured.matcher import Grammar, MaskRow, masks
from pagedjax.weights.pretrained import DEFAULT_MODEL, load_model


class MaskResult(NamedTuple):
    """Whether the masks accepted an instance, and the seconds of each mask."""

    accepted: bool
    mask_seconds: list[float]


def follow(grammar: Grammar, tokens: Sequence[int], stops: Sequence[int]) -> MaskResult:
    """Follow the tokens through the masks, until a mask forbids one of them or the end."""
    matcher = grammar.matcher()
    seconds = []
    for i, token in enumerate([*tokens, stops[0]]):
        started = time.perf_counter()
        row = MaskRow(matcher, output=tokens[:i], drafts=(), first=0, stops=stops)
        (mask,) = masks([row], 1)
        seconds.append(time.perf_counter() - started)
        # a mask has a bit for each token, 32 in a word
        word, bit = divmod(token, 32)
        is_allowed = bool((mask[word] >> np.uint32(bit)) & np.uint32(1))
        if matcher.error is not None or not is_allowed:
            return MaskResult(False, seconds)
    return MaskResult(True, seconds)


def files(folder: Path, limit: int | None) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yields (schema, instances) of each file; with a limit, of files spread over the folder."""
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise ValueError(
            f"{folder} has no .json file; name the folder of schemas, such as maskbench/data"
        )
    step = 1 if limit is None else max(1, len(paths) // limit)
    for path in paths[::step][:limit]:
        content = json.loads(path.read_text("utf-8"))
        tests = content.get("tests") if isinstance(content, dict) else None
        if isinstance(tests, list) and "schema" in content:
            yield content["schema"], tests
        else:
            yield content, []


def reason(error: ValueError) -> str:
    """The kind of a refusal: its keyword, or the parser's sentence without numbers and names."""
    text = str(error)
    keyword = re.search(r"has the keyword ('[^']*')", text)
    if keyword:
        return f"keyword {keyword[1]}"
    return re.sub(r'".*?"|\d+', "...", text.rpartition(": ")[2])[:60]


def measure(grammars: Grammars, folder: Path, limit: int | None) -> dict[str, Any]:
    """Compile the schemas of a folder and follow their instances.

    Returns the counts of schemas and instances, the refusals, and quantiles of the times.
    """
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    compile_seconds = []
    mask_seconds = []
    for schema, tests in files(folder, limit):
        counts["schemas"] += 1
        started = time.perf_counter()
        try:
            grammar = grammars.compiled(StructuredOutputsParams(json=json.dumps(schema)))
        except ValueError as error:
            refused[reason(error)] += 1
            continue
        compile_seconds.append(time.perf_counter() - started)
        counts["compiled"] += 1
        has_wrong_test = False
        for test in tests:
            tokens = grammars.tokenizer.encode(
                json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            )
            followed = follow(grammar, tokens, grammars.eos_token_ids)
            mask_seconds += followed.mask_seconds
            counts["valid" if test["valid"] else "invalid"] += 1
            counts["valid rejected"] += test["valid"] and not followed.accepted
            counts["invalid accepted"] += not test["valid"] and followed.accepted
            has_wrong_test = has_wrong_test or followed.accepted != test["valid"]
        counts["schemas right in all instances"] += bool(tests) and not has_wrong_test
    return {
        **counts,
        "refused": dict(refused.most_common(20)),
        "compile_ms": _quantiles(compile_seconds),
        "mask_ms": _quantiles(mask_seconds),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the maximum in milliseconds; {} for no seconds."""
    if not seconds:
        return {}
    p50, p99, maximum = (1e3 * np.quantile(seconds, (0.5, 0.99, 1.0))).tolist()
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(maximum, 3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, help="so many files, spread over the folder")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer is used")
    args = parser.parse_args(argv)
    model = load_model(args.model, progress=False)
    grammars = Grammars(model.tokenizer, model.model.config.vocab_size, model.eos_token_ids)
    figures = measure(grammars, args.folder, args.limit)
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")
    write_report(args.json, {"model": args.model, **figures})


if __name__ == "__main__":
    main()
