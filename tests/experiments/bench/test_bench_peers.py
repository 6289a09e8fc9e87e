"""The benchmark of other engines. Contenders are real processes: this engine, and adapters of a few
lines.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from experiments.bench import peers
from tests.weights.tiny import tiny_llama

COUNTING = """
import time
from adapter import serve

def load(model, options):
    if "broken" in options:
        raise RuntimeError("no such engine")
    print("loading", model)                 # an engine may print: it must not reach the conversation
    def generate(requests):
        time.sleep(options.get("seconds", 0))
        return [[(sum(prompt) + i + options.get("other", 0)) % 50 for i in range(count - options.get("short", 0))]
                for prompt, count in requests]
    return generate, "1.0"

serve(load)
"""


@pytest.fixture
def config(tmp_path):
    """Writes a config of contenders that all run COUNTING, with the options given by name."""
    adapter = tmp_path / "counting.py"
    adapter.write_text(COUNTING)
    model = str(tiny_llama(tmp_path / "llama", tied=True))

    def write(**contenders: dict) -> list[str]:
        entries = {
            name: {"adapter": str(adapter), "exact": options.pop("exact", True), "options": options}
            for name, options in contenders.items()
        }
        file = tmp_path / "peers.yaml"
        file.write_text(yaml.safe_dump({"model": model, "contenders": entries}, sort_keys=False))
        return [str(file), "--work", str(tmp_path / "work"), "--requests", "4", "--repeats", "3"]

    return write


def test_ratios_are_taken_within_rounds(config, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = config(quick={"seconds": 0.05}, slow={"seconds": 0.2})
    assert peers.main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    quick, slow = report["rows"]
    assert (quick["contender"], quick["ratio"]) == ("quick", 1.0)
    assert 2 < slow["ratio_least"] <= slow["ratio"] <= slow["ratio_most"] < 6
    assert slow["least"] <= slow["tokens_per_s"] <= slow["most"] < quick["least"]
    assert report["same_tokens"] == {"quick": 1.0, "slow": 1.0}
    assert "quick is so many times as fast" in capsys.readouterr().out


def test_table_of_known_rates():
    rows = peers.table({"ours": [100.0, 50.0, 80.0], "theirs": [50.0, 20.0, 100.0]}, "ours")
    assert [row["tokens_per_s"] for row in rows] == [80.0, 50.0]
    assert (rows[1]["ratio_least"], rows[1]["ratio"], rows[1]["ratio_most"]) == (0.8, 2.0, 2.5)


def test_round_with_stolen_processors_is_repeated(monkeypatch, capsys):
    """Ratios are of passes in one round; when time runs out, rounds count as they are."""
    from types import SimpleNamespace

    lost = iter([0.0, 0.2, 0.0, 0.0, 0.3, 0.0] + [0.5] * 20)
    rate = iter(range(1, 100))
    monkeypatch.setattr(peers, "one_pass", lambda *_: (float(next(rate)), next(lost)))
    engines = [SimpleNamespace(name=name) for name in ("a", "b")]
    assert peers.rounds(engines, [([1], 1)], 1) == {"a": [3.0], "b": [4.0]}  # type: ignore[arg-type]
    assert peers.rounds(engines, [([1], 1)], 1) == {"a": [9.0], "b": [10.0]}  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("not counted") == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("[{}]", 'entry 0: needs "prompt"'), ("[1]", "entry 0: needs"), ("{", "is not JSON")],
)
def test_bad_workload_file_is_reported(config, tmp_path, capsys, text, message):
    (tmp_path / "odd.json").write_text(text)
    for file, why in (
        (tmp_path / "none.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert peers.main([*config(first={}), "--file", str(file)]) == 2
        errors = capsys.readouterr().err
        assert (
            f"error: --file is '{file}', which cannot be read: {why}; name a JSON list of requests"
            in errors
        )
    assert peers.main([*config(first={}), "--file", str(tmp_path / "odd.json")]) == 2
    errors = capsys.readouterr().err
    assert f"error: {tmp_path / 'odd.json'}" in errors
    assert message in errors


def test_request_file_is_read_like_in_an_experiment(tmp_path):
    """configs/w1.yaml names it with `kind: tokens`; both names of an output's length are taken."""
    file = tmp_path / "w1.json"
    file.write_text(json.dumps([{"prompt": [3, 4], "max_tokens": 5}, {"prompt": [6], "n": 2}]))
    assert peers.w1(str(file), 100) == [([3, 4], 5), ([6], 2)]


def test_inexact_contender_marked_exact_ends_run(config):
    with pytest.raises(SystemExit, match="second gives other tokens than first"):
        peers.main(config(first={}, second={"other": 1}))


def test_inexact_contender_is_timed(config, capsys):
    assert peers.main(config(first={}, second={"other": 1, "exact": False})) == 0
    assert "second                                  0% of 4 requests" in capsys.readouterr().out


def test_too_few_tokens_are_an_error(config):
    with pytest.raises(SystemExit, match="first gave 23 tokens instead of 24"):
        peers.main(config(first={"short": 1}))


def test_failed_start_error_has_reason_and_log(config):
    with pytest.raises(
        SystemExit,
        match=r"second: RuntimeError: no such engine; what it printed is in .*peer1\.log",
    ):
        peers.main(config(first={}, second={"broken": True}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"adapter": "vlm"},
            "contenders.first.adapter is 'vlm'; it must be one of llama_cpp, openvino, pagedjax",
        ),
        ({"pyhton": "python"}, "'pyhton'; did you mean 'python'?"),
        ({"exact": "yes"}, "contenders.first.exact is 'yes'; it must be true or false"),
    ],
)
def test_config_errors(tmp_path, capsys, change, message):
    file = tmp_path / "peers.yaml"
    file.write_text(yaml.safe_dump({"contenders": {"first": {"adapter": "pagedjax"} | change}}))
    assert peers.main([str(file)]) == 2
    assert message in capsys.readouterr().err


def test_missing_python_is_reported(config, tmp_path):
    file = Path(config(first={})[0])
    entries = yaml.safe_load(file.read_text())
    entries["contenders"]["first"]["python"] = "no-such-python"
    file.write_text(yaml.safe_dump(entries))
    with pytest.raises(SystemExit, match="first: cannot run 'no-such-python'"):
        peers.main([str(file), "--work", str(tmp_path / "work")])


def test_only_needs_names_of_the_config(config, capsys):
    assert peers.main([*config(first={}, second={}), "--only", "third"]) == 2
    assert "--only names 'third'; the config has 'first', 'second'" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoint_is_written_as_hugging_face_directory(tmp_path):
    from pagedjax.weights.locate import open_checkpoint

    folder = peers.write_out("smollm2-135m", tmp_path)
    embedded = open_checkpoint("smollm2-135m")
    written = open_checkpoint(folder)
    assert set(embedded.tensors) == set(written.tensors)
    name = "model.layers.3.mlp.down_proj.weight"
    assert (embedded.tensors[name].read() == written.tensors[name].read()).all()
    assert peers.write_out(str(folder), tmp_path / "elsewhere") == folder  # it is one already


@pytest.mark.slow
def test_pagedjax_adapter(tmp_path, capsys):
    """Twice, with another block size: real processes, real tokens."""
    options = {"max_model_len": 160, "max_num_seqs": 4, "num_blocks": 200, "token_buckets": [8, 64]}
    options["max_num_batched_tokens"] = 64
    contenders = {
        f"blocks of {size}": {"adapter": "pagedjax", "options": {**options, "block_size": size}}
        for size in (4, 16)
    }
    file = tmp_path / "peers.yaml"
    work = tmp_path / "work.json"
    model = tiny_llama(tmp_path / "llama", tied=True)
    file.write_text(yaml.safe_dump({"model": str(model), "contenders": contenders}))
    work.write_text(json.dumps([{"prompt": [5, 6, 7 + i], "n": 5} for i in range(3)]))
    arguments = [str(file), "--file", str(work), "--repeats", "1", "--work", str(tmp_path)]
    assert peers.main(arguments) == 0, capsys.readouterr().err
    assert "blocks of 16                          100% of 3 requests" in capsys.readouterr().out
