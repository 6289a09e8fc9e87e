"""The benchmark of other engines. Contenders are real processes: this engine, and adapters of a few
lines.
"""

from __future__ import annotations

import json

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
        if len(requests) > options.get("most", 64):
            raise RuntimeError(f"{len(requests)} requests at once")
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
            name: {
                "adapter": options.pop("adapter", str(adapter)),
                "exact": options.pop("exact", True),
                "python": options.pop("python", ""),
                "options": options,
            }
            for name, options in contenders.items()
        }
        file = tmp_path / "peers.yaml"
        file.write_text(yaml.safe_dump({"model": model, "contenders": entries}, sort_keys=False))
        return [str(file), "--work", str(tmp_path / "work"), "--requests", "4", "--repeats", "3"]

    return write


def test_ratios_are_taken_within_rounds(config, tmp_path):
    """A contender that is not marked `exact` is timed, whatever its tokens."""
    out = tmp_path / "out.json"
    arguments = config(quick={"seconds": 0.05}, slow={"seconds": 0.2, "other": 1, "exact": False})
    assert peers.main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    quick, slow = report["rows"]
    assert (quick["contender"], quick["ratio"]) == ("quick", 1.0)
    assert 2 < slow["ratio_least"] <= slow["ratio"] <= slow["ratio_most"] < 6
    assert slow["least"] <= slow["tokens_per_s"] <= slow["most"] < quick["least"]
    assert report["same_tokens"] == {"quick": 1.0, "slow": 0.0}


def test_requests_of_given_lengths_are_sent_a_few_at_once(config, tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--lengths", "7", "5", "--at-once", "3", "--json", str(out)]
    assert peers.main([*config(first={"most": 3}), *sizes]) == 0
    report = json.loads(out.read_text())
    counts = [report[name] for name in ("requests", "at_once", "prompt_tokens", "output_tokens")]
    assert counts == [4, 3, 28, 20]
    with pytest.raises(SystemExit, match="first: RuntimeError: 4 requests at once"):
        peers.main([*config(first={"most": 3}), "--lengths", "7", "5"])
    with pytest.raises(SystemExit):
        peers.main([*config(first={}), "--lengths", "7", "5", "--file", "requests.json"])


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
    assert peers.run_rounds(engines, [([1], 1)], 1) == {"a": [3.0], "b": [4.0]}  # type: ignore[arg-type]
    assert peers.run_rounds(engines, [([1], 1)], 1) == {"a": [9.0], "b": [10.0]}  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("not counted") == 3


def test_request_file_is_read_like_in_an_experiment(tmp_path):
    """configs/w1.yaml names it with `kind: tokens`; both names of an output's length are taken."""
    file = tmp_path / "w1.json"
    file.write_text(json.dumps([{"prompt": [3, 4], "max_tokens": 5}, {"prompt": [6], "n": 2}]))
    assert peers.w1(str(file), 100) == [([3, 4], 5), ([6], 2)]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"other": 1}, "second gives other tokens than first"),
        ({"short": 1}, "second gave 23 tokens instead of 24"),
        (
            {"broken": True},
            r"second: RuntimeError: no such engine; what it printed is in .*peer1\.log",
        ),
        ({"python": "no-such-python"}, "second: cannot run 'no-such-python'"),
    ],
)
def test_a_contender_that_fails_ends_the_run(config, second, message):
    with pytest.raises(SystemExit, match=message):
        peers.main(config(first={}, second=second))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("odd.json", "[1]", "odd.json, entry 0: needs"),
        (
            "none.json",
            None,
            "none.json', which cannot be read: No such file or directory; name a JSON list of",
        ),
    ],
)
def test_bad_workload_file_is_reported(config, tmp_path, capsys, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert peers.main([*config(first={}), "--file", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_bad_contenders_are_reported(config, capsys):
    assert peers.main(config(first={"adapter": "vlm"})) == 2
    message = "contenders.first.adapter is 'vlm'; it must be one of llama_cpp, openvino, pagedjax"
    assert message in capsys.readouterr().err
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


@pytest.mark.exhaustive
def test_pagedjax_adapter(tmp_path, capsys):
    """Twice, with another block size: real processes, real tokens."""
    options = {
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 200,
        "token_buckets": [8, 64],
    }
    contenders = {
        str(size): {"adapter": "pagedjax", "options": {**options, "block_size": size}}
        for size in (4, 16)
    }
    file = tmp_path / "peers.yaml"
    requests = tmp_path / "requests.json"
    out = tmp_path / "out.json"
    model = tiny_llama(tmp_path / "llama", tied=True)
    file.write_text(yaml.safe_dump({"model": str(model), "contenders": contenders}))
    requests.write_text(json.dumps([{"prompt": [5, 6, 7 + i], "n": 5} for i in range(3)]))
    files = ["--file", str(requests), "--work", str(tmp_path), "--json", str(out)]
    assert peers.main([str(file), *files, "--repeats", "1"]) == 0, capsys.readouterr().err
    assert json.loads(out.read_text())["same_tokens"] == {"4": 1.0, "16": 1.0}
