"""Do two commits do the same? For a change of the code that must change nothing for a user.

    python -m tests.unchanged              # the working tree against its last commit
    python -m tests.unchanged main~3       # against another one
    python -m tests.unchanged main~3 --keep build/unchanged    # and keep what both did, to read it

Both trees do the same work on models that the working tree has written, each in a process of its
own, and write what they did into files: of each engine the StableHLO of its programs, its options,
memory and cache, its answers and its recording; of simulated experiments the requests, steps and
summaries; the help of each command, the server's OpenAPI document, and the public names. The files
must be equal, byte by byte. Exit status 1: one differs.

It takes about four minutes. Everything is read through what users may use, so that the inside may
change.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 64,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "token_buckets": (8, 32),
    "compilation": "eager",
}
# Two devices for a mesh. What both trees compile alike need not be fast.
XLA_FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
# a number of drafts that adapts depends on a clock
NGRAM = {"method": "ngram", "num_tokens": 3, "adaptive": False}
# By name: the model's folder, and the engine's options beside SIZES. A path in them is relative to
# the models' folder.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "xla": ("llama", {"attention_impl": "xla", "linear_impl": "xla"}),
    "int8": ("llama", {"weight_dtype": "int8"}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "invariant": ("llama", {"batch_invariant": True}),
    "adapters": ("llama", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "quest": ("llama", {"kv_policy": {"name": "quest", "tokens": 16, "dense_layers": 1}}),
    "streaming": ("llama", {"kv_policy": {"name": "streaming", "window": 24, "sinks": 4}}),
    "window groups": ("windows", {}),
    "eagle": (
        "llama",
        {
            "speculative": {
                "method": "eagle",
                "model": "head",
                "num_tokens": 3,
                "adaptive": False,
            }
        },
    ),
    "draft model": (
        "llama",
        {
            "speculative": {
                "method": "draft",
                "model": "small",
                "num_tokens": 3,
                "adaptive": False,
                "rule": "rejection",
            }
        },
    ),
    "ngram": ("llama", {"speculative": NGRAM}),
    "lookahead": ("llama", {"lookahead": 2}),
    "recomputed": ("llama", {"num_blocks": 26, "enable_prefix_caching": False}),
    "swapped": ("llama", {"num_blocks": 26, "preemption": "swap", "swap_space_gib": 0.01}),
    "mesh": ("llama", {"mesh": {"tensor": 2}}),
}
# In StableHLO, from where in the source an operation is.
PLACES = re.compile(
    r"""^\#loc.*\n
    |\ loc\(\#loc\d*\)
    |\ loc\(callsite\(\#loc\d*\ at\ \#loc\d*\)\)
    |\ loc\("[^"]*"(\(\#loc\d*\))?\)
    |\ loc\(unknown\)""",
    re.MULTILINE | re.VERBOSE,
)
# In results, which code gave them.
COMMIT = re.compile(r'"(commit|source)": ?"[^"]*",?')
SIMULATED = "simulate={chip: h100, model: llama-3-8b}"  # real steps take other times in each run
EXPERIMENTS = {
    "speculation": ["workload.count=24"],
    "parallel_sampling": [SIMULATED],
    "swap": [SIMULATED],
    "pools": ["workload.count=100"],
    "routers": ["workload.count=100"],
}
COMMANDS = (
    ["pagedjax"],
    *(
        ["pagedjax", command]
        for command in (
            "generate",
            "chat",
            "convert",
            "serve",
            "replay",
            "check",
            "view",
            "trace",
            "bench",
            "whatif",
            "diff",
            "blame",
        )
    ),
    ["experiments.run"],
    ["experiments.compare"],
    ["experiments.report"],
    ["experiments.reproduce"],
)


# What one tree does: it runs with that tree as PYTHONPATH, and this file may be newer than the tree
# ------------------


def describe(out: Path, models: Path) -> None:
    """Do the work of all sections, and write a folder for each."""
    for name, (model, options) in ENGINES.items():
        describe_engine(name, models, model, options, out / "engines" / name)
    describe_commands(out / "commands")
    describe_names(out / "names")
    describe_server(models / "llama", out / "server")


def describe_engine(
    name: str, models: Path, model: str, options: dict[str, Any], out: Path
) -> None:
    """Write an engine's programs, options, answers and recording."""
    import jax

    from pagedjax import LLM

    out.mkdir(parents=True)
    options = SIZES | options
    speculative = options.get("speculative", {})
    if "model" in speculative:
        drafter = models / speculative["model"]
        options = options | {"speculative": speculative | {"model": str(drafter)}}
    with programs_in(out / "programs"):
        llm = LLM(models / model, progress=False, compilation_cache=False, **options)
        llm.engine.record(out / "recording.jsonl", prompts=True)
        answers = list(answers_of(name, llm, models))
        llm.engine.record(None)
    (out / "answers.txt").write_text("\n".join(answers) + "\n")

    resolved = dataclasses.asdict(llm.engine.config)
    report = llm.engine.memory._asdict()
    for machine in ("total", "free", "other", "activations"):
        del report[machine]
    pages = [
        f"{leaf.dtype}{list(leaf.shape)}"
        for leaf in jax.tree.leaves(llm.engine.runtime.cache_shapes)
    ]
    facts = {"options": resolved, "memory": report, "cache": sorted(pages)}
    text = json.dumps(facts, indent=1, default=str).replace(str(models), "MODELS")
    (out / "facts.json").write_text(text + "\n")


@contextmanager
def programs_in(folder: Path) -> Iterator[None]:
    """Within the block, JAX writes the StableHLO of each program that it lowers; after it, a file
    lists their hashes.

    The order in which programs are lowered is not compared, and neither are their numbers.
    """
    from jax._src import config

    folder.mkdir()
    config.config.update("jax_dump_ir_to", str(folder))
    config.config.update("jax_dump_ir_modes", "stablehlo")
    try:
        yield
    finally:
        config.config.update("jax_dump_ir_to", "")
    lines = []
    for file in folder.iterdir():
        text = PLACES.sub("", file.read_text())
        file.write_text(text)
        lines.append(f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {len(text)} characters")
    (folder.parent / "programs.txt").write_text("\n".join(sorted(lines)) + "\n")


def answers_of(name: str, llm: Any, models: Path) -> Iterator[str]:
    """A line for each output of requests of several kinds."""
    import numpy as np

    from pagedjax import (
        BeamSearchParams,
        LoRARequest,
        SamplingParams,
        StructuredOutputsParams,
        Taps,
    )

    rng = np.random.default_rng(0)
    lengths = (5, 40, 1, 33, 12, 40)
    prompts = [rng.integers(3, 320, length).tolist() for length in lengths]
    prompts[5][:32] = prompts[1][:32]  # a shared prefix
    common = {"max_tokens": 16, "logprobs": 2}
    params: list[Any] = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, n=2, **common),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.05, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, **common),
        SamplingParams(temperature=1.0, seed=5, stop=["a", "th"], min_tokens=3, **common),
        SamplingParams(temperature=0.0, prompt_logprobs=1, ignore_eos=True, **common),
    ]
    options: dict[str, Any] = {"use_tqdm": False}
    if name == "adapters":
        adapter = LoRARequest("adapter", 1, str(models / "adapter"))
        options["lora_request"] = [None, adapter, adapter, None, adapter, None]
    for output in llm.generate(prompts, params, **options):
        yield repr(output.prompt_logprobs)
        for branch in output.outputs:
            yield repr(
                (
                    branch.token_ids,
                    branch.text,
                    branch.finish_reason,
                    branch.stop_reason,
                    branch.cumulative_logprob,
                    branch.logprobs,
                )
            )
    if name != "plain":
        return
    beams = llm.generate(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False)
    for output in beams:
        for beam in output.outputs:
            yield repr((beam.token_ids, beam.cumulative_logprob, beam.finish_reason))
    form = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "integer"}}}
    )
    structured = SamplingParams(temperature=1.0, seed=1, max_tokens=20, structured_outputs=form)
    yield repr(llm.generate(prompts[:2], structured, use_tqdm=False)[1].outputs[0].token_ids)
    tapped = SamplingParams(
        temperature=0.0, max_tokens=4, taps=Taps(hidden_states=(0, 2), attention={1: 0})
    )
    taps = llm.generate(prompts[3:4], tapped, use_tqdm=False)[0].outputs[0].taps
    for layer, array in sorted(taps.hidden_states.items()):
        yield f"hidden states {layer} {hashlib.sha256(np.asarray(array).tobytes()).hexdigest()}"
    embedding = llm.embed(prompts[:1], use_tqdm=False)[0].outputs.embedding
    yield repr(np.asarray(embedding).tolist())


def describe_commands(out: Path) -> None:
    """Write the help of each command."""
    out.mkdir(parents=True)
    for words in COMMANDS:
        command = [sys.executable, "-m", *words, "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        (out / f"{' '.join(words)}.txt").write_text(text)


def describe_names(out: Path) -> None:
    """Write the public names, and the fields or arguments of each."""
    import pagedjax

    out.mkdir(parents=True)
    lines = []
    for name in sorted(pagedjax.__all__):
        value = getattr(pagedjax, name)
        lines.append(f"{name} {inspect.signature(value) if callable(value) else ''}")
        if inspect.isclass(value):
            lines.extend(f"  {name}.{field}" for field in sorted(dir(value)) if field[0] != "_")
    (out / "public.txt").write_text("\n".join(lines) + "\n")


def describe_server(model: Path, out: Path) -> None:
    """Write the server's OpenAPI document."""
    from pagedjax import LLM
    from pagedjax.server.app import Options, create_app

    out.mkdir(parents=True)
    llm = LLM(model, progress=False, **SIZES | {"compilation": "lazy"})
    document = create_app(llm, Options(name="tiny")).openapi()
    (out / "openapi.json").write_text(json.dumps(document, indent=1) + "\n")


# The comparison -----------------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    """Write the models that both trees load: two decoders, an adapter, and two drafters."""
    import numpy as np

    from experiments.training import train_draft
    from pagedjax import load_model
    from pagedjax.weights.draft_model import write_eagle
    from tests.weights.tiny import tiny_llama, write_json
    from tests.weights.tiny_adapters import tiny_adapter

    llama = tiny_llama(folder / "llama", tied=False)
    tiny_llama(folder / "small", layers=1, heads=2, kv_heads=1, hidden=32, tied=False, seed=5)
    tiny_adapter(folder / "adapter", llama)
    windows = tiny_llama(folder / "windows", tied=False, qkv_bias=True)
    config = json.loads((windows / "config.json").read_text())
    config |= {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    write_json(windows / "config.json", config)
    model = load_model(llama, linear_impl="xla").model
    ids = np.arange(0, 320, 2)
    write_eagle(folder / "head", model.config, ids.tolist(), train_draft.initial(model, ids, 1)[1])


def run_tree(tree: Path, out: Path, models: Path) -> None:
    """Let a tree do the work of `describe`, and its simulated experiments."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(tree)
    environment["XLA_FLAGS"] = XLA_FLAGS
    script = [sys.executable, str(Path(__file__).resolve()), "--describe", str(out), str(models)]
    subprocess.run(script, cwd=tree, env=environment, check=True)
    for name, settings in EXPERIMENTS.items():
        runs = out / "runs" / name
        command = [sys.executable, "-m", "experiments.run", f"configs/{name}.yaml", "--quiet"]
        command += ["--out", str(runs)]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, cwd=tree, env=environment, check=True)
        for file in runs.rglob("*"):
            if file.name in ("env.json", "sweep.json", "report.html"):
                file.unlink()  # of the machine and of the moment
            elif file.name in ("summary.json", "runs.jsonl"):
                file.write_text(COMMIT.sub("", file.read_text()))


@contextmanager
def tree_of(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit, for the time of the block."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def differences(before: Path, after: Path) -> Iterator[str]:
    """A few lines about each file that differs."""
    names = {
        file.relative_to(folder)
        for folder in (before, after)
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".mlir"
    }
    for name in sorted(names):
        old = before / name
        new = after / name
        if not (old.is_file() and new.is_file()):
            yield f"{name}: is only in {'the working tree' if new.is_file() else 'the commit'}"
        elif old.read_bytes() != new.read_bytes():
            lines = [file.read_text(errors="replace").splitlines() for file in (old, new)]
            changed = [line[:200] for line in difflib.unified_diff(*lines, n=0, lineterm="")][2:8]
            yield "\n  ".join([f"{name}:", *changed])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.unchanged", description="Do two commits do the same?"
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what both trees did")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_models(work / "models")
        with tree_of(arguments.commit, work / "tree") as tree, ThreadPoolExecutor(2) as threads:
            before = threads.submit(run_tree, tree, work / "before", work / "models")
            after = threads.submit(run_tree, ROOT, work / "after", work / "models")
            before.result()
            after.result()
        report = list(differences(work / "before", work / "after"))
        if arguments.keep:
            for folder in ("before", "after"):
                shutil.copytree(work / folder, arguments.keep / folder, dirs_exist_ok=True)
        count = sum(file.is_file() for file in (work / "after").rglob("*"))
    print("\n".join(report) or f"same: {count} files")
    return 1 if report else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--describe"]:
        describe(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
