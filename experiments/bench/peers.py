"""How fast is this engine compared with other engines, on the same requests in turn?

    python -m experiments.bench.peers            # configs/peers.yaml: transformers, on this Python
    python -m experiments.bench.peers my_peers.yaml --file requests.json --json out.json

Workload W1: 64 requests at time 0, prompts of 16 to 256 and outputs of 16 to 128 random tokens,
uniform; EOS ignored. Without `--file` its ids are drawn; with it they are read, [{"prompt": [ids],
"max_tokens": count}, ...]. `--lengths 64 128` gives all drawn requests these lengths, and
`--at-once 1` sends so many together, the next ones when all are answered. Each contender is a
separate process, run by the Python that the config names (peer_adapters/), and is stopped (SIGSTOP)
while another one works. The checkpoint is written once as a Hugging Face directory in float32, so
all contenders read the same weights. First, every contender answers a part of the workload; the run
ends if a contender marked `exact` gives other greedy tokens than the first one. Then follow rounds:
each contender once, in turn. The results are medians over rounds and medians of the ratios within
rounds, because a slow minute affects a whole round. A round is repeated if the host gave more than
5 % of the processors to other machines in one of its passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.harness import bench_parser
from experiments.core import strict_yaml
from experiments.core.environment import cpu_model, git_state, processor_time, stolen_share
from experiments.core.json_files import write_json
from experiments.core.workloads import Tokens, read_tokens

ROOT = Path(__file__).parents[1]
ADAPTERS = sorted(
    file.stem.removeprefix("run_") for file in (ROOT / "bench" / "peer_adapters").glob("run_*.py")
)
STOLEN = 0.05  # rounds with a larger share of stolen processor time are shown but not counted
EXTRA = 2  # at most EXTRA * repeats additional rounds replace those that are not counted
COMPARED_REQUESTS = 8  # compared before timing
COMPARED_TOKENS = 24  # of each of these requests, at most
# The option of an adapter that is the most requests at a time
AT_ONCE = {
    "pagedjax": "max_num_seqs",
    "vllm": "max_num_seqs",
    "openvino": "max_num_seqs",
    "llama_cpp": "slots",
    "transformers": "batch",
}

Work = list[tuple[list[int], int]]  # prompt token ids, tokens to generate
Option = int | float | str | bool | tuple[int, ...]


@dataclass(frozen=True)
class Contender:
    """adapter: a name of ADAPTERS, or the path of such a file. python: the interpreter; empty is
    this Python.

    exact: its greedy tokens must equal those of the first contender; set false for lower precision.
    """

    adapter: str
    python: str = ""
    exact: bool = True
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.adapter not in ADAPTERS and not Path(self.adapter).is_file():
            raise ValueError(
                f"adapter is {self.adapter!r}; it must be one of {', '.join(ADAPTERS)}, or a file"
            )


@dataclass(frozen=True)
class Config:
    """contenders: by display name; ratios are relative to the first one."""

    contenders: Mapping[str, Contender]
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        if not self.contenders:
            raise ValueError("contenders is empty; name at least one")


def w1(file: str | None, vocab: int, lengths: Sequence[int] | None = None) -> Work:
    """The workload W1: from a file in the format of `kind: tokens`, or else drawn.

    lengths: the prompt and output tokens of each drawn request, instead of those of W1.
    """
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(
                f"--file is {file!r}, which cannot be read: {why}; name a JSON list of requests"
            ) from None
        prompts, counts, _ = read_tokens(Tokens("tokens", file), text, vocab)
        return [(list(prompt), count) for prompt, count in zip(prompts, counts, strict=True)]
    rng = np.random.default_rng(1234)
    prompt_lengths = rng.integers(16, 257, 64)
    output_lengths = rng.integers(16, 129, 64)
    if lengths:
        prompt_lengths = np.full(64, lengths[0])
        output_lengths = np.full(64, lengths[1])
    return [
        (rng.integers(17, vocab, length).tolist(), int(count))
        for length, count in zip(prompt_lengths, output_lengths, strict=True)
    ]


def write_out(model: str, folder: Path) -> Path:
    """The checkpoint as a Hugging Face directory: itself, or a copy in float32 in `folder`."""
    from pagedjax.weights.locate import open_checkpoint
    from pagedjax.weights.tokenizer_files import load_tokenizer

    checkpoint = open_checkpoint(model)
    if checkpoint.format == "huggingface":
        return checkpoint.path

    from safetensors.numpy import save_file
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    target = folder / checkpoint.path.stem
    if not (target / "config.json").exists():  # config.json is written last
        target.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: np.ascontiguousarray(tensor.read(), np.float32)
            for name, tensor in checkpoint.tensors.items()
        }
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        load_tokenizer(checkpoint).backend.save(str(target / "tokenizer.json"))
        # needed by llama.cpp's converter
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[checkpoint.config["model_type"]]
        config = {"architectures": [architecture], **checkpoint.config, "torch_dtype": "float32"}
        write_json(target / "config.json", config, end="")
    return target


class Peer:
    """A contender's process. It is stopped except while it answers."""

    def __init__(
        self, name: str, contender: Contender, model: Path, log: Path, at_once: int | None = None
    ) -> None:
        """at_once: requests that are sent together; None: all."""
        self.name = name
        self.contender = contender
        self.log = log
        self.at_once = at_once
        adapter = ROOT / "bench" / "peer_adapters" / f"run_{contender.adapter}.py"
        script = adapter if contender.adapter in ADAPTERS else Path(contender.adapter)
        python = os.path.expanduser(contender.python) or sys.executable
        paths = [
            str(ROOT / "bench" / "peer_adapters"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with log.open("w", encoding="utf-8") as errors:
            try:
                self.process = subprocess.Popen(
                    [python, str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    start_new_session=True,  # a new process group: child processes are stopped too
                )
            except OSError as error:
                problem = f"cannot run {python!r} ({error.strerror}); see `python` in the config"
                raise SystemExit(f"error: {name}: {problem}") from None
        options = dict(contender.options)
        if at_once is not None and contender.adapter in AT_ONCE:
            options[AT_ONCE[contender.adapter]] = at_once
        ready = self._ask({"model": str(model), "options": options})
        self.load_seconds = ready["ready"]
        self.version = ready["version"]

    def generate(self, work: Work) -> tuple[list[list[int]], float]:
        """Answer the requests. Returns the tokens of each request, and the seconds."""
        answers = []
        seconds = 0.0
        size = self.at_once or len(work)
        for start in range(0, len(work), size):
            answer = self._ask({"requests": work[start : start + size]})
            answers += answer["tokens"]
            seconds += answer["seconds"]
        for (_, count), tokens in zip(work, answers, strict=True):
            if len(tokens) != count:
                raise SystemExit(f"error: {self.name} gave {len(tokens)} tokens instead of {count}")
        return answers, seconds

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "it ended without an answer"}
        if "error" in answer:
            raise SystemExit(
                f"error: {self.name}: {answer['error']}; what it printed is in {self.log}"
            )
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        if self.process.stdin:
            self.process.stdin.close()  # the end of its input ends the process
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()


def equal_share(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Share of requests with equal tokens."""
    return sum(list(a) == list(b) for a, b in zip(answers, expected, strict=True)) / len(answers)


def compare(peers: Sequence[Peer], work: Work) -> dict[str, float]:
    """By name, the share of requests with the same tokens as the first peer.

    Raises:
        SystemExit: a contender marked `exact` gives other tokens.
    """
    part = [(prompt, min(count, COMPARED_TOKENS)) for prompt, count in work[:COMPARED_REQUESTS]]
    answers = {peer.name: peer.generate(part)[0] for peer in peers}
    first = answers[peers[0].name]
    shares = {name: equal_share(first, answer) for name, answer in answers.items()}
    for peer in peers:
        print(
            f"  {peer.name:36} {shares[peer.name]:5.0%} of {len(part)} requests give the same "
            "tokens",
            flush=True,
        )
        if peer.contender.exact and shares[peer.name] < 1:
            raise SystemExit(
                f"error: {peer.name} gives other tokens than {peers[0].name}, so the work differs; "
                "nothing was timed. Set `exact: false` if this is expected"
            )
    return shares


def run_rounds(peers: Sequence[Peer], work: Work, repeats: int) -> dict[str, list[float]]:
    """Run the contenders in turn.

    Returns output tokens per second of each counted round, by name.
    """
    count = sum(n for _, n in work)
    rates: dict[str, list[float]] = {peer.name: [] for peer in peers}
    counted = 0
    for rounds_left in range((1 + EXTRA) * repeats, 0, -1):
        passes = {peer.name: one_pass(peer, work, count) for peer in peers}
        is_disturbed = max(stolen for _, stolen in passes.values()) > STOLEN
        rounds_needed = repeats - counted
        can_repeat = rounds_left > rounds_needed
        if is_disturbed and can_repeat:
            print("  this round is not counted", flush=True)
            continue
        for name, (rate, _) in passes.items():
            rates[name].append(rate)
        counted += 1
        if counted == repeats:
            break
    return rates


def one_pass(peer: Peer, work: Work, count: int) -> tuple[float, float]:
    """Make a pass. Returns output tokens per second, and the share of stolen processor time."""
    processors = processor_time()
    _, seconds = peer.generate(work)
    stolen = stolen_share(processors) or 0.0
    note = f"  {stolen:.0%} of the processors stolen" if stolen > 0.005 else ""
    print(f"  {peer.name:36} {count / seconds:7.1f} output tokens/s{note}", flush=True)
    return count / seconds, stolen


def table(rates: Mapping[str, Sequence[float]], first: str) -> list[dict[str, Any]]:
    """A row for each contender: its tokens/s, and the ratios first / this, round by round."""
    rows = []
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(rates[first], values, strict=True)]
        rows.append(
            {
                "contender": name,
                "tokens_per_s": statistics.median(values),
                "least": min(values),
                "most": max(values),
                "ratio": statistics.median(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
            }
        )
    return rows


def show(rows: Sequence[Mapping[str, Any]], first: str) -> None:
    print(f"\n{'':36} output tokens/s             {first} is so many times as fast")
    print(f"{'':36}  median     min     max    median     min     max")
    for r in rows:
        print(
            f"{r['contender']:36} {r['tokens_per_s']:7.1f} {r['least']:7.1f} {r['most']:7.1f}",
            end="   ",
        )
        print(f"{r['ratio']:7.2f} {r['ratio_least']:7.2f} {r['ratio_most']:7.2f}")


def peers_parser() -> argparse.ArgumentParser:
    parser = bench_parser(__doc__, model=False)
    parser.add_argument("config", nargs="?", default=str(ROOT.parent / "configs" / "peers.yaml"))
    parser.add_argument("--file", help="a JSON list of requests instead of drawn ones")
    parser.add_argument("--requests", type=int, help="only so many of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--lengths", type=int, nargs=2, metavar=("PROMPT", "OUTPUT"), help="of each drawn request"
    )
    parser.add_argument("--at-once", type=int, help="requests that are sent together; all")
    parser.add_argument(
        "--only", nargs="+", help="names of contenders; ratios are relative to the first"
    )
    parser.add_argument(
        "--work", default="build/peers", help="folder for the checkpoint and the contenders' output"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = peers_parser()
    args = parser.parse_args(argv)
    counts = (args.repeats, args.requests, args.at_once, *(args.lengths or ()))
    if any(count is not None and count < 1 for count in counts):
        parser.error("--repeats, --requests, --at-once and --lengths must be at least 1")
    if args.file and args.lengths:
        parser.error("--lengths is for drawn requests, and --file has its own; give one of them")
    try:
        config = strict_yaml.parse(Config, strict_yaml.load_file(Path(args.config)), "")
        contenders = _choose_contenders(config, args.only)
        folder = Path(args.work)
        folder.mkdir(parents=True, exist_ok=True)
        model = write_out(config.model, folder)
        vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        work = w1(args.file, vocab, args.lengths)[: args.requests]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    peers: list[Peer] = []
    # so that no stopped contender is left
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for i, (name, contender) in enumerate(contenders.items()):
            log = folder / f"peer{i}.log"
            peers.append(Peer(name, contender, model.resolve(), log, args.at_once))
            print(
                f"  {name:36} {peers[-1].version}, ready after {peers[-1].load_seconds:.1f} s",
                flush=True,
            )
        shares = compare(peers, work)
        rows = table(run_rounds(peers, work, args.repeats), peers[0].name)
    finally:
        for peer in peers:
            peer.close()
    show(rows, peers[0].name)
    if args.json:
        at_once = args.at_once or len(work)
        results = {"at_once": at_once, "same_tokens": shares, "rows": rows}
        write_json(args.json, facts_of(peers, work) | results)
    return 0


def facts_of(peers: Sequence[Peer], work: Work) -> dict[str, Any]:
    """When, where, what and by which versions was measured, as fields of the results."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        **git_state(ROOT),
        "cpu": cpu_model(),
        "requests": len(work),
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "output_tokens": sum(count for _, count in work),
        "versions": {peer.name: peer.version for peer in peers},
        "load_seconds": {peer.name: peer.load_seconds for peer in peers},
    }


def _choose_contenders(config: Config, names: Sequence[str] | None) -> dict[str, Contender]:
    for name in names or ():
        if name not in config.contenders:
            raise ValueError(
                f"--only names {name!r}; the config has {', '.join(map(repr, config.contenders))}"
            )
    return {name: config.contenders[name] for name in names or config.contenders}


if __name__ == "__main__":
    sys.exit(main())
