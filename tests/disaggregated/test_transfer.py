"""Handovers between two real processes, and what happens when one of them is killed."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.disaggregated import Transfers
from pagedjax.host import replay, scheduler
from tests.disaggregated.cut_link import Link
from tests.engine.runs import sampled, small_llm, steps, token_ids
from tests.refusals import refused

ENGINE: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "num_blocks": 256,
}


@contextmanager
def offering(folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """A process that has computed all prompts, and its offers."""
    job = {
        "model": str(folder),
        "engine": ENGINE,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "offers": str(tmp_path / "offers"),
        "recording": str(tmp_path / "prefill.jsonl"),
    }
    command = [sys.executable, "-m", "tests.disaggregated.sender", json.dumps(job)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "offered\n"
            yield process, pickle.loads((tmp_path / "offers").read_bytes())
        finally:
            process.kill()


PROMPTS = [np.random.default_rng(n).integers(3, 320, n).tolist() for n in (40, 7, 33)]
PROMPTS.append([*PROMPTS[0][:32], 9, 9])  # two of its blocks are there already
MAX_TOKENS = 12


def test_an_address_without_a_host_is_refused():
    with refused("address is ':70'; it must be HOST:PORT"):
        Transfers(":70")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "cut"), [(None, None), (2, None), (0, None), (None, 20_000), (None, 60_000)]
)
def test_tokens_are_those_of_one_engine_whatever_happens_to_the_other(
    tiny_folder, tiny_llm, tmp_path, killed, cut
):
    """`killed`: after so many sequences were adopted. `cut`: the network, after so many bytes of
    pages.
    """
    engine = small_llm(tiny_folder).engine
    timeout = 3.0 if cut or killed == 0 else 20.0  # seconds; each late answer takes it
    if killed:
        timeout = 6.0  # of two that are late; the others must be on time
    transfers = Transfers("127.0.0.1:0", timeout=timeout)
    engine.record(tmp_path / "decode.jsonl")
    first_late = killed
    adopted = []
    with offering(tiny_folder, tmp_path) as (process, offers):
        if cut is not None:
            link = Link(offers[0].address, cut)
            offers = [offer._replace(address=link.address) for offer in offers]
            sizes = [sum(math.prod(shape) * 4 for shape, _ in offer.shapes) for offer in offers]
            totals = list(itertools.accumulate(sizes))
            first_late = sum(total <= cut for total in totals)
            assert cut not in totals, "the cut is between two transfers and not within one"
        for i, offer in enumerate(offers):
            if i == killed:
                process.kill()
                process.wait()
            adopted.append(transfers.adopt(engine, f"d{i}", offer))
            scheduler.check(engine.scheduler_state)
    later = sampled(steps(engine))
    tokens = [
        [*offer.handover.tokens.tolist(), *later.get(f"d{i}", [])] for i, offer in enumerate(offers)
    ]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(4)
    ]
    expected = zip(PROMPTS, token_ids(tiny_llm, PROMPTS, params), strict=True)
    assert tokens == [[*prompt, *output] for prompt, output in expected]
    on_time = len(adopted) if first_late is None else first_late
    assert adopted[:on_time] == [True] * on_time
    if cut is not None:
        assert not any(adopted[on_time:])
        assert cut < link.passed < totals[-1]
    else:
        assert killed is None or not adopted[killed]
    engine.record(None)
    assert replay.verify(tmp_path / "prefill.jsonl").identical
    assert replay.verify(tmp_path / "decode.jsonl").identical
