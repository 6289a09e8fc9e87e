"""The command line, in this process: what it prints, and what it says of mistakes."""

from __future__ import annotations

import io

import pytest

from pagedjax import LLM, SamplingParams, cli
from pagedjax.server import run


def generate(*words: str, model) -> int:
    return cli.main(["generate", *words, "--model", str(model), "--max-model-len", "64", "--max-tokens", "4"])


def test_it_prints_the_prompt_and_what_the_library_generates(tiny_folder, tiny, capsys):
    assert generate("abc", model=tiny_folder) == 0
    llm = LLM(tiny, progress=False, max_num_seqs=1, num_blocks=8, token_buckets=(64,), max_num_batched_tokens=64)
    (wanted,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert capsys.readouterr().out == f"abc{wanted.outputs[0].text}\n"
    assert generate("abc", "--only-new", model=tiny_folder) == 0
    assert capsys.readouterr().out == f"{wanted.outputs[0].text}\n"


def test_a_prompt_may_come_from_standard_input(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert generate("-", model=tiny_folder) == 0
    assert capsys.readouterr().out.startswith("abc")


def test_its_engine_compiles_the_buckets_of_one_request_when_they_are_needed():
    options = cli.engine_options(cli.parser().parse_args(["generate", "", "--budget", "16", "--dtype", "bfloat16"]))
    assert options["token_buckets"] == (2, 16)
    assert (options["compilation"], options["max_num_seqs"]) == ("lazy", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--max-model-len", "4096"], "max_model_len is 4096, but the model was made for 512 tokens"),
        (["--model", "nowhere-at-all"], "nowhere-at-all"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(tiny_folder, capsys, words, message):
    assert cli.main(["generate", "abc", "--model", str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("pagedjax: ")
    assert message in line


def test_convert_writes_a_folder_that_generates_the_same(tiny_folder, tmp_path, capsys):
    assert generate("abc", model=tiny_folder) == 0
    wanted = capsys.readouterr().out
    model = tiny_folder
    for to in ("orbax", "safetensors"):
        target = tmp_path / to
        assert cli.main(["convert", str(model), str(target), "--to", to, "--shard-gb", "0.0001"]) == 0
        assert capsys.readouterr().out == f"{target}\n"
        model = target
        assert generate("abc", model=model) == 0
        assert capsys.readouterr().out == wanted
    assert len(list(target.glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "orbax"], "there and not an empty folder"),
        (["--to", "safetensors", "--shard-gb", "0"], "shard_bytes is 0"),
    ],
)
def test_mistakes_of_convert_are_one_line(tiny_folder, capsys, words, message):
    assert cli.main(["convert", str(tiny_folder), str(tiny_folder), *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("pagedjax: ")
    assert message in line


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "x"), 2, "pagedjax: [Errno 13] Permission denied: 'x'\n"),
        (IsADirectoryError(21, "Is a directory", "x"), 2, "pagedjax: [Errno 21] Is a directory: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, error, code, said):
    def fail(*args):
        raise error

    monkeypatch.setattr(cli, "generate", fail)
    assert cli.main(["generate", "abc"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_has_gone_is_no_mistake(monkeypatch):
    def leave(*args):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "generate", leave)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert cli.main(["generate", "abc"]) == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [(".", "here"), ("../here", "here"), ("link", "link"), ("org/model", "model"), ("m.gguf", "m.gguf")],
)
def test_a_server_names_its_model_after_the_folder(tmp_path, monkeypatch, model, name):
    """A link's own name is the one that was meant: Hugging Face's cache links to files that are named by hashes."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    assert run.name_of(model) == name


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve-nothing"])
    assert ended.value.code == 2
