"""Counts of drafts from a page of metrics, and in what `pagedjax bench serve` prints."""

from __future__ import annotations

import json
import shlex
from contextlib import redirect_stdout
from io import StringIO

import pytest

from pagedjax import LLM
from pagedjax.commands import cli
from pagedjax.server.load_client import speculation
from pagedjax.server.load_client.speculation import Drafts
from tests.server.support import ENGINE, served_to

PAGE = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
"""


def test_the_counts_of_vllms_page_are_read():
    assert speculation.read(PAGE) == Drafts(40, 17, (9, 8))
    assert speculation.read("") == Drafts()


def test_counts_of_a_run_are_the_difference():
    assert Drafts(40, 17, (9, 8)) - Drafts(10, 5, (5,)) == Drafts(30, 12, (4, 8))
    assert Drafts() - Drafts() == Drafts()


def test_a_server_that_does_not_answer_has_no_counts():
    assert speculation.fetch("http://127.0.0.1:9/v1", None) == Drafts()


@pytest.mark.default_cases("speculative1")
@pytest.mark.parametrize(
    "speculative", [None, {"method": "ngram", "num_tokens": 3, "adaptive": False}]
)
def test_a_load_run_prints_the_accepted_drafts(tiny, tmp_path, speculative):
    # as in tests/server/test_server.py, for the same programs
    sizes = ENGINE | {"token_buckets": (64,)}
    with served_to(LLM(tiny, progress=False, speculative=speculative, **sizes)) as (server, _):
        load = "--requests 4 --arrivals at-once --prompt-tokens 12 --output-tokens 30"
        words = shlex.split(f"--url {server.url} {load} --ignore-eos --vocab 300")
        words += ["--json", str(tmp_path / "out.json")]
        with redirect_stdout(StringIO()) as printed:
            assert cli.main(["bench", "serve", *words]) == 0
    drafts = json.loads((tmp_path / "out.json").read_text())["drafts"]
    assert (drafts["tokens"] > 0) == (speculative is not None)
    assert ("draft tokens accepted" in printed.getvalue()) == (speculative is not None)
