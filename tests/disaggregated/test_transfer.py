"""Handovers between two real processes, and what happens when one of them is killed."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.disaggregated import Transfers
from pagedjax.host import replay, scheduler
from pagedjax.host.types import Sampled
from tests.disaggregated.cut_link import Link

ENGINE: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
}
PROMPTS = [np.random.default_rng(n).integers(3, 320, n).tolist() for n in (40, 7, 33)]
PROMPTS.append([*PROMPTS[0][:32], 9, 9])  # two of its blocks are there already
MAX_TOKENS = 12


def test_an_address_without_a_host_is_refused():
    with pytest.raises(ValueError, match="address is ':70'; it must be HOST:PORT"):
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
    job = {
        "model": str(tiny_folder),
        "engine": ENGINE,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
    }
    job |= {"offers": str(tmp_path / "offers"), "recording": str(tmp_path / "prefill.jsonl")}
    command = [sys.executable, "-m", "tests.disaggregated.sender", json.dumps(job)]
    root = Path(__file__).parents[2]
    llm = LLM(tiny_folder, progress=False, **ENGINE)
    engine = llm.engine
    timeout = 20.0 if cut is None and killed != 0 else 3.0  # seconds; each late answer takes it
    transfers = Transfers("127.0.0.1:0", timeout=timeout)
    engine.record(tmp_path / "decode.jsonl")
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "offered\n"
            offers = pickle.loads((tmp_path / "offers").read_bytes())
            adopted = []
            link = None
            if cut is not None:
                link = Link(offers[0].address, cut)
                offers = [offer._replace(address=link.address) for offer in offers]
                sizes = [sum(math.prod(shape) * 4 for shape, _ in offer.shapes) for offer in offers]
                first_cut = next(i for i in range(len(sizes)) if sum(sizes[: i + 1]) > cut)
                assert sum(sizes[:first_cut]) < cut, (
                    "the cut is between two transfers and not within one"
                )
            for i, offer in enumerate(offers):
                if i == killed:
                    process.kill()
                    process.wait()
                adopted.append(transfers.adopt(engine, f"d{i}", offer))
                scheduler.check(engine.scheduler_state)
        finally:
            process.kill()
    tokens = [offer.handover.tokens.tolist() for offer in offers]
    while engine.has_work:
        result: Any = engine.step()
        for event in result.events:
            for name, token in (
                zip(event.request_ids, event.token_ids, strict=True)
                if isinstance(event, Sampled)
                else ()
            ):
                tokens[int(name[1:])].append(token)
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(4)
    ]
    expected = tiny_llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    assert tokens == [
        [*ids, *output.outputs[0].token_ids] for ids, output in zip(PROMPTS, expected, strict=True)
    ]
    first_waits = adopted.index(False) if False in adopted else None
    if link is None:
        assert first_waits == killed
    else:
        assert first_waits == first_cut
        assert not any(adopted[first_cut:])
        assert cut < link.passed < sum(sizes)
    engine.record(None)
    assert replay.verify(tmp_path / "prefill.jsonl").identical
    assert replay.verify(tmp_path / "decode.jsonl").identical
