"""The command line: its output, its options and its errors."""

from __future__ import annotations

import dataclasses
import io

import pytest

from pagedjax import SamplingParams
from pagedjax.commands import cli
from pagedjax.commands.options import first_sentences
from pagedjax.options.config import EngineConfig, Speculative
from pagedjax.server import serve
from tests import fresh_python

NEITHER = "is '4', which is neither NAME=VALUE,... nor a JSON object"


def generate(*words: str, model) -> int:
    return cli.main(
        ["generate", *words, "--model", str(model), "--max-model-len", "64", "--max-tokens", "4"]
    )


def test_generate_prints_the_prompt_and_the_text_of_the_library(tiny_folder, tiny_llm, capsys):
    assert generate("abc", model=tiny_folder) == 0
    (output,) = tiny_llm.generate(
        "abc", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
    )
    assert capsys.readouterr().out == f"abc{output.outputs[0].text}\n"
    assert generate("abc", "--only-new", model=tiny_folder) == 0
    assert capsys.readouterr().out == f"{output.outputs[0].text}\n"


def test_a_prompt_may_come_from_standard_input(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert generate("-", model=tiny_folder) == 0
    assert capsys.readouterr().out.startswith("abc")


def test_the_engine_of_generate_is_lazy_and_for_one_request():
    options = cli.engine_options(
        cli.parser().parse_args(["generate", "", "--budget", "16", "--dtype", "bfloat16"])
    )
    assert options["token_buckets"] == (2, 16)
    assert (options["compilation"], options["max_num_seqs"]) == ("lazy", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (
            ["--max-model-len", "4096"],
            "max_model_len is 4096, but the model was made for 512 tokens",
        ),
        (["--model", "nowhere-at-all"], "nowhere-at-all"),
    ],
)
def test_errors_of_generate_are_one_line_and_exit_code_2(tiny_folder, capsys, words, message):
    assert cli.main(["generate", "abc", "--model", str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("pagedjax: ")
    assert message in line


def test_a_converted_model_generates_the_same_text(tiny_folder, tmp_path, capsys):
    assert generate("abc", model=tiny_folder) == 0
    text = capsys.readouterr().out
    model = tiny_folder
    for to in ("orbax", "safetensors"):
        target = tmp_path / to
        assert (
            cli.main(["convert", str(model), str(target), "--to", to, "--shard-gb", "0.0001"]) == 0
        )
        assert capsys.readouterr().out == f"{target}\n"
        model = target
        assert generate("abc", model=model) == 0
        assert capsys.readouterr().out == text
    assert len(list(target.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "orbax"], "exists and is not an empty folder"),
        (["--to", "safetensors", "--shard-gb", "0"], "shard_bytes is 0"),
    ],
)
def test_errors_of_convert_are_one_line(tiny_folder, capsys, words, message):
    assert cli.main(["convert", str(tiny_folder), str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("pagedjax: ")
    assert message in line


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (
            PermissionError(13, "Permission denied", "x"),
            2,
            "pagedjax: [Errno 13] Permission denied: 'x'\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_system_are_one_line(monkeypatch, capsys, error, code, printed):
    def fail(*args):
        raise error

    monkeypatch.setattr(cli, "generate", fail)
    assert cli.main(["generate", "abc"]) == code
    assert capsys.readouterr().err == printed


def test_a_closed_pipe_is_not_an_error(monkeypatch):
    def close(*args):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "generate", close)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert cli.main(["generate", "abc"]) == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (".", "here"),
        ("../here", "here"),
        ("link", "link"),
        ("org/model", "model"),
        ("m.gguf", "m.gguf"),
    ],
)
def test_the_default_model_name_is_that_of_the_folder_or_link(tmp_path, monkeypatch, model, name):
    """The name of a link counts, because links of Hugging Face's cache point to files named by
    hashes.
    """
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    assert serve.name_of(model) == name


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("tensor=2,expert=3", {"tensor": 2, "expert": 3}),
        ('{"tensor": 4}', {"tensor": 4}),
        ("num_cpus=0.5,num_gpus=2", {"num_cpus": 0.5, "num_gpus": 2}),
        ('{"model": "a=b"}', {"model": "a=b"}),
        (
            "method=draft,model=runs/rate=0.1,adaptive=false",
            {"method": "draft", "model": "runs/rate=0.1", "adaptive": False},
        ),
    ],
)
def test_a_mapping_is_written_as_pairs_or_as_json(text, mesh):
    assert cli.parser().parse_args(["generate", "x", "--mesh", text]).mesh == mesh


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve-nothing"], "there is no command 'serve-nothing'; write one of generate"),
        (["serve", "--block-size", "x"], "argument --block-size: invalid int value: 'x'"),
        (
            ["serve", "--dtype", "float31"],
            "argument --dtype: invalid choice: 'float31' (choose from 'float32', ",
        ),
        (["serve", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (
            ["serve", "--no-such", "--other=3"],
            "unrecognized arguments: --no-such; unrecognized arguments: --other; did you mean --router? (see ",
        ),
        (["serve", "a", "b"], "unrecognized arguments: b (see pagedjax serve --help)"),
        (["generate"], "the following arguments are required: prompt"),
        (
            ["serve", "--max-num-seq", "3"],
            "unrecognized arguments: --max-num-seq; did you mean --max-num-seqs? (see ",
        ),
        (
            ["serve", "--model", "m"],
            "--model is no option here; the model is a word of its own: pagedjax serve MODEL",
        ),
        (
            ["serve", "--mesh", "4"],
            f"--mesh/--mesh-config {NEITHER}; write tensor=4, or tensor=2,expert=2 (see ",
        ),
        (
            ["serve", "--autoscaling", "4"],
            f"--autoscaling {NEITHER}; write max_replicas=4,target_ongoing_requests=32",
        ),
        (
            ["serve", "--token-buckets", "8,x"],
            "--token-buckets is '8,x'; write ascending integers, such as 8,64,512",
        ),
        (["serve", "--devices", "x"], "--devices is 'x'; write integers, such as 0,1 (see "),
        (
            ["serve", "--max-body-mib", "0"],
            "--max-body-mib is 0; it must be a number of MiB above 0, such as 8",
        ),
        (
            ["serve", "--drain-seconds", "-1"],
            "--drain-seconds is -1; it must be a whole number of seconds, at least 0",
        ),
        (
            ["serve", "--restarts", "-1"],
            "--restarts is -1; it must be a whole number, at least 0",
        ),
        (
            ["generate", "x", "--budget", "0"],
            "--max-num-batched-tokens/--budget is 0; it must be an integer of at ",
        ),
    ],
)
def test_errors_of_options_are_one_line_and_exit_code_2(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pagedjax: {message}")


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--api-key", "hunter2"],
        ["--api-key", "hunter2", "serve"],
        ["bench", "serve", "--api-key", "hunter2"],
        ["serve", "m", "--hf-token", "hunter2"],
        ["serve", "m", "--api-ke", "hunter2"],
    ],
)
def test_a_secret_on_the_command_line_is_not_shown(capsys, words):
    """Options were abbreviated, so this key was the name of a file that the error named."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    file = "write the key into a file, and give --api-key-file FILE to serve or bench serve (see"
    assert not any("--api-key" in word for word in words) or file in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "m --gpu-memory-utilization 0.9",
            "is vLLM's name; write --memory-fraction 0.9 (see pagedjax serve --help)",
        ),
        (
            "--tensor-parallel-size=4",
            "--tensor-parallel-size is vLLM's name; write --mesh tensor=4 (see ",
        ),
        ("-tp 4", "-tp is vLLM's name; write --mesh tensor=4 (see "),
        ("--no-enable-chunked-prefill", "is vLLM's name; write --no-chunked-prefill (see "),
        ("--swap-space 4", "is vLLM's name; write --swap-space-gib 4 --preemption swap (see "),
        (
            "--disable-log-requests",
            "is vLLM's, and changes nothing here (an engine logs nothing; see engine.record",
        ),
        (
            "--pipeline-parallel-size 2",
            "is vLLM's, and there are no stages of a pipeline; use tensor_parallel_size",
        ),
        (
            "--max-logprobs 5",
            "no option of pagedjax serve; in Python, LLM(...) takes max_logprobs: up to 20, which ",
        ),
    ],
)
def test_an_option_of_vllm_is_answered_with_ours(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_generate_has_fewer_options_than_serve_and_says_so(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "x", "--gpu-memory-utilization", "0.9", "-tp", "2"])
    errors = capsys.readouterr().err
    assert (
        "--gpu-memory-utilization is vLLM's, and no option of pagedjax generate; in Python, LLM(...) takes"
        in errors
    )
    assert "-tp is vLLM's name; write --mesh tensor=2 (see pagedjax generate --help)" in errors


def test_the_token_budget_has_the_engines_name_and_a_short_one():
    for flag in ("--max-num-batched-tokens", "--budget"):
        for words in (["generate", "x"], ["chat"]):
            options = cli.engine_options(cli.parser().parse_args([*words, flag, "64"]))
            assert options["max_num_batched_tokens"] == 64


def test_help_explains_every_engine_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["serve", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert "token slots in a cache block (S); the default is 16" in help_text
    assert (
        "share of the device's free memory for a step and the cache when num_blocks is None; the default is 0"
        in help_text
    )
    for default in ("default 127.0.0.1", "413; default 8", "429; default 256"):
        assert default in help_text
    about = first_sentences(EngineConfig)
    assert {field.name for field in dataclasses.fields(EngineConfig)} == set(about)
    assert [name for name, text in about.items() if not text or "\n" in text] == []


def test_every_engine_option_is_a_field_with_its_type():
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    args = vars(cli.parser().parse_args(["serve"]))
    assert {name for name in fields if args[name] is not None} == set()
    words = "--block-size 8 --memory-fraction 0.25 --no-mixed-steps --token-buckets 8,2048"
    words += " --policy a.py:B --kv-cache-dtype float16 --speculative-config"
    speculative = '{"method": "ngram", "num_speculative_tokens": 5}'
    args = vars(cli.parser().parse_args(["serve", *words.split(), speculative]))
    assert EngineConfig(
        **{name: args[name] for name in fields if args[name] is not None}
    ) == EngineConfig(
        block_size=8,
        memory_fraction=0.25,
        mixed_steps=False,
        token_buckets=(8, 2048),
        policy="a.py:B",
        kv_cache_dtype="float16",
        speculative=Speculative(method="ngram", num_tokens=5),
    )


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["bench", "serve", "--help"]])
def test_help_does_not_import_jax(words):
    code = f"""
import sys
from pagedjax.commands import cli
try:
    cli.main({words!r})
except SystemExit as ended:
    assert ended.code == 0
heavy = {{"jax", "numpy", "flax", "transformers", "fastapi", "httpx"}} & set(sys.modules)
assert not heavy, heavy
"""
    assert fresh_python.output_of(code, timeout=60).startswith("usage: pagedjax")


@pytest.mark.parametrize("words", [["generate", "x"], ["chat"], ["serve"]])
def test_the_compilation_cache_has_a_switch(words):
    assert cli.parser().parse_args(words).compilation_cache is True
    assert cli.parser().parse_args([*words, "--no-compilation-cache"]).compilation_cache is False
