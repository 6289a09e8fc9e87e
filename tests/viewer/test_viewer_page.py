"""The page as a file: it loads nothing, no text of a user becomes code, and its size is bounded."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from pagedjax import viewer
from pagedjax.commands import cli
from pagedjax.host.replay import ReplayError
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request
from pagedjax.viewer import document, text
from pagedjax.viewer.drafts import token_list
from tests.viewer.runs import GOLDENS, Writer, crowd, drafting_run, random_run, without_why

NASTY = "</script><script>alert(1)</script> $title ${data} <!-- é 漢字 🙂 \u2028 & \" ' \\"


def parts(html: str) -> tuple[dict, dict | None]:
    """The data of the page: the readable element, and the packed one."""
    (about,) = re.findall(
        r'<script type="application/json" id="about">(.*?)</script>', html, re.DOTALL
    )
    (data,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(about), json.loads(gzip.decompress(base64.b64decode(data))) if data else None


@pytest.fixture
def log(tmp_path: Path) -> Path:
    random_run(tmp_path / "run.jsonl", 5, num_blocks=10)
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("live", [False, True])
def test_the_page_loads_nothing_from_outside(log, live):
    html = viewer.live_page() if live else viewer.page(viewer.read(log))
    code = re.sub(r'(id="data">)[^<]*', r"\1", html)
    assert len(code) > 50_000
    assert not re.search(
        r"https?:|[\"'`]//|@import|url\(|\bsrc\s*=|<link|<iframe|<img|import\(", code
    )
    assert "default-src 'none'" in html
    assert ("connect-src 'self'" if live else "connect-src 'none'") in html
    assert html.count("</script>") == 3


def test_the_page_contains_the_frames(log):
    run = viewer.read(log)
    about, data = parts(viewer.page(run))
    assert data is not None
    assert data["frames"] == json.loads(json.dumps(run.frames))
    assert about["config"]["num_blocks"] == 10
    assert (about["name"], about["policy"], about["timed"]) == ("run.jsonl", "fcfs", False)
    assert viewer.page(run) == viewer.page(viewer.read(log))  # the same run, the same bytes


def test_the_data_of_a_page_without_drafts_is_as_before():
    run = viewer.read(GOLDENS / "run.jsonl")
    about, data = parts(viewer.page(run))
    frames = json.loads((GOLDENS / "frames.json").read_text())
    assert data is not None
    data["frames"] = without_why(data["frames"])
    assert data == {"about": about, "frames": frames, "prompts": {}, "labels": {}}
    assert not {"accepted", "verified"} & {key for frame in frames for key in frame}


def test_the_page_of_a_run_with_drafts_contains_their_tokens(tmp_path):
    drafting_run(tmp_path / "run.jsonl", 2)
    run = viewer.read(tmp_path / "run.jsonl")
    _, data = parts(viewer.page(run, decode=lambda ids: "".join(f"<{i}>" for i in ids)))
    assert data is not None
    assert data["frames"] == json.loads(json.dumps(run.frames))
    generated = [token for tokens in text.generated(run.frames).values() for token in tokens]
    assert sum("accepted" in frame for frame in run.frames) > 10
    assert data["words"] == {str(token): f"<{token}>" for token in sorted(set(generated))}


def test_all_tokens_of_a_row_count_towards_the_limit(tmp_path, monkeypatch):
    drafting_run(tmp_path / "run.jsonl", 2)
    run = viewer.read(tmp_path / "run.jsonl")
    tokens = sum(
        max(1, len(token_list(entry))) for frame in run.frames for entry in frame.get("sampled", ())
    )
    monkeypatch.setattr(document, "MAX_TOKENS", tokens)
    assert document.bounded(run) == (run, False)
    monkeypatch.setattr(document, "MAX_TOKENS", tokens - 1)
    assert document.bounded(run)[1]


def test_text_of_users_is_escaped(tmp_path):
    path = tmp_path / "</script><b>$data.jsonl".replace("/", "_")
    writer = Writer(
        path,
        SchedulerConfig(
            block_size=2, num_blocks=6, max_num_batched_tokens=5, max_num_seqs=4, max_model_len=12
        ),
    )
    writer.submit(Request(NASTY, 2, 2))
    writer.recorder.close()
    html = viewer.page(viewer.read(path), labels={NASTY: NASTY, "nobody": "x"})
    assert "alert(1)" not in html
    assert html.count("</script>") == 3
    about, data = parts(html)
    assert about["name"] == path.name
    assert data is not None
    assert data["labels"] == {"0": NASTY}
    assert data["frames"][0]["came"][0][1] == NASTY
    assert "<title>&lt;_script&gt;&lt;b&gt;$data.jsonl" in html


def test_a_live_page_contains_its_url():
    about, data = parts(viewer.live_page("viewer/steps?<x>"))
    assert about["live"] == "viewer/steps?<x>"
    assert data is None


def decode(ids) -> str:
    """Tokens below 256 are bytes, as of a tokenizer that splits characters."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("sentence", ["plain", "naïve", "漢字 and 🙂🙃", "🙂", ""])
def test_pieces_join_to_the_text_and_never_show_half_a_character(sentence):
    ids = list(sentence.encode())
    pieces = text.pieces(decode, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == sentence
    assert text.REPLACEMENT not in "".join(pieces)


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement():
    assert text.pieces(decode, [65, 0xF0, 0x9F]) == ["A", "", text.REPLACEMENT]


def test_texts_are_words_and_their_corrections(tmp_path):
    frames = [
        {
            "step": 0,
            "came": [[0, "a", 2, 9, 0, "", None]],
            "rows": [0, 0, [[0, 0, 2, 2]]],
            "tables": [[0, 0, [1]]],
            "counts": [2, 1, 0, 0],
            "sampled": [0xC3],
        },
        {"step": 1, "counts": [1, 1, 0, 0], "sampled": [0xA9]},
    ]
    texts = text.texts(frames, {0: (72, 105)}, decode)
    half = text.REPLACEMENT
    assert texts == {
        "words": {72: "H", 105: "i", 0xC3: half, 0xA9: half},
        "fixes": {0: {0: "", 1: "é"}},
        "labels": {0: "Hi"},
    }


def test_a_run_of_many_steps_stays_small(tmp_path):
    """Bytes a step: what changed, and a token for each sequence."""
    crowd(tmp_path / "run.jsonl", steps=600, blocks=300, seqs=32)
    run = viewer.read(tmp_path / "run.jsonl")
    html = viewer.page(run)
    assert len(run.frames) == 601
    assert len(html) < 95_000 + 600 * 250
    assert len(html) < (tmp_path / "run.jsonl").stat().st_size / 3


def test_tokens_beyond_the_limit_are_left_out_and_marked(tmp_path, monkeypatch):
    crowd(tmp_path / "run.jsonl", steps=40, blocks=60, seqs=8)
    run = viewer.read(tmp_path / "run.jsonl")
    monkeypatch.setattr(document, "MAX_TOKENS", 10)
    about, data = parts(
        viewer.page(run, decode=lambda ids: "x" * len(ids), labels={"r0": "y" * 3000})
    )
    assert data is not None
    assert about["bare"]
    assert "words" not in data
    assert not any("sampled" in frame for frame in data["frames"])
    assert data["labels"]["0"] == "y" * 2000 + " …"


# the commands -------------------------------------------------------------------------------------


def test_view_writes_a_page_beside_the_recording_or_to_the_given_path(log, tmp_path, capsys):
    assert cli.main(["view", str(log)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    assert parts((tmp_path / "run.html").read_text("utf-8"))[0]["name"] == "run.jsonl"
    assert cli.main(["view", str(log), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_bytes() == (tmp_path / "run.html").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no whole line: nothing was recorded"),
        (b"hello\n", "line 1 is not JSON in ASCII"),
        (b"\x00\xff\xfe\n", "line 1 is not JSON in ASCII"),
        (b'{"a":1}\n', "line 1 has no format number; this version reads format 2"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (
            b'{"pagedjax_replay":2,"pagedjax":"0","policy":"lifo","config":{}}\n',
            "line 1 names the policy 'lifo'",
        ),
    ],
)
@pytest.mark.parametrize("command", ["view", "trace"])
def test_a_file_that_is_no_recording_is_an_error_with_the_remedy(
    tmp_path, capsys, command, content, message
):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert cli.main([command, str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"pagedjax: {path} cannot be shown: ")
    assert message in line
    assert "llm.engine.record('run.jsonl')" in line


@pytest.mark.parametrize("command", ["view", "trace", "replay"])
def test_a_missing_recording_and_a_folder_in_its_place_are_named(command, tmp_path, capsys):
    missing = tmp_path / "none.jsonl"
    assert cli.main([command, str(missing)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"pagedjax: there is no file {missing}; name one that was recorded, by llm.engine.record("
    )
    assert error.endswith("or by `pagedjax serve --record run.jsonl`\n")
    assert cli.main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"pagedjax: {tmp_path} is a directory; name the file that was recorded, e.g. run.jsonl in it\n"
    )


def test_forbidden_targets_are_errors(log, tmp_path, capsys):
    before = log.read_bytes()
    assert cli.main(["view", str(log), "-o", str(log)]) == 2
    assert "is the recording itself" in capsys.readouterr().err
    assert log.read_bytes() == before
    assert cli.main(["trace", str(log), "-o", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_recording_refused_by_the_scheduler_is_an_error_with_its_line(log):
    lines = log.read_text().splitlines(keepends=True)
    log.write_text(lines[0] + '{"commit":{"sampled":[],"hashes":{},"choices":{},"events":[]}}\n')
    with pytest.raises(ReplayError, match="line 2 is refused: a commit without a schedule"):
        viewer.read(log)
