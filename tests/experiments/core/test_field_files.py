"""Files of the field: ShareGPT's conversations, BurstGPT's CSV and Mooncake's JSON lines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import chex
import numpy as np
import pytest

from experiments.core.config import expand
from experiments.core.field_files import BlockIds
from experiments.core.workloads import BurstGPT, Mooncake, ShareGPT, Workload, check
from tests.experiments.core.summaries import BASE, simulated_run
from tests.experiments.core.test_workloads import make


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in messages]}


TALKS = [
    said(("human", "first"), ("gpt", "an answer"), ("human", "and then?"), ("gpt", "more")),
    said(("gpt", "the end of an earlier part"), ("human", "no answer")),
    said(("system", "be brief"), ("user", "second one"), ("chatgpt", "ok")),
    said(("human", "  "), ("gpt", "nothing was asked")),
    said(("human", "third"), ("gpt", "3")),
    {"conversations": []},
]
BURSTS = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
46,ChatGPT,20,0,20,Conversation log
44,ChatGPT,100,30,130,API log
118,ChatGPT,417,276,693,Conversation log
"""
PIECES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 7]},
    {"timestamp": 500, "input_length": 512, "output_length": 9, "hash_ids": [3]},
]
MOONCAKE = "".join(json.dumps(piece) + "\n" for piece in PIECES)


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    return [(i.arrival, len(i.prompt_token_ids), i.max_tokens) for i in workload.items]


def test_a_conversation_gives_its_first_question_and_the_length_of_its_answer():
    spec = ShareGPT("sharegpt", "s.json")
    content = json.dumps(TALKS)
    workload = make(spec, content, vocab=128)
    texts = ["".join(map(chr, item.prompt_token_ids)) for item in workload.items]
    assert texts == ["first", "second one", "third"]
    assert [item.max_tokens for item in workload.items] == [len("an answer"), len("ok"), 1]
    cut = make(replace(spec, max_prompt_tokens=5, max_output_tokens=2), content, vocab=128)
    assert rows(cut) == [(0.0, 5, 2), (0.0, 5, 2), (0.0, 5, 1)]
    assert (cut.clipped_prompts, cut.clipped_outputs) == (1, 1)


def test_conversations_are_shuffled_by_the_seed():
    content = json.dumps(
        [said(("human", f"question {i}"), ("gpt", "a" * (i + 1))) for i in range(30)]
    )
    spec = ShareGPT("sharegpt", "s.json", shuffle=True)
    orders = [[i.max_tokens for i in make(spec, content, seed).items] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(1, 31)) != orders[2]
    first_seven = make(replace(spec, limit=7), content, 2)
    assert [item.max_tokens for item in first_seven.items] == orders[2][:7]


def test_bursts_are_read_by_time_without_those_that_failed():
    spec = BurstGPT("burstgpt", "b.csv")
    assert rows(make(spec, BURSTS)) == [
        (0, 472, 18),
        (39, 100, 30),
        (40.5, 1087, 230),
        (113, 417, 276),
    ]
    chats = replace(spec, model="ChatGPT", log_type="Conversation log", time_scale=0.5)
    assert rows(make(chats, BURSTS)) == [(0, 472, 18), (56.5, 417, 276)]
    assert rows(make(replace(spec, offset=1, limit=2, max_prompt_tokens=500), BURSTS)) == [
        (0, 100, 30),
        (1.5, 500, 230),
    ]


def test_blocks_of_one_id_have_equal_tokens():
    spec = Mooncake("mooncake", "m.jsonl", rounds=2)
    workload = make(spec, MOONCAKE, seed=3, vocab=5000)
    assert rows(workload)[:3] == [(0.0, 1100, 5), (0.5, 512, 9), (1.5, 1030, 1)]
    assert workload.clipped_outputs == 2, "one in each round"
    first_prompt, second_prompt, third_prompt, fourth_prompt, *_ = (
        np.asarray(item.prompt_token_ids) for item in workload.items
    )
    chex.assert_trees_all_equal(first_prompt[:1024], third_prompt[:1024])
    assert (first_prompt[1024:1030] != third_prompt[1024:]).any()
    for different in (
        second_prompt,
        first_prompt[512:1024],
        fourth_prompt[:512],
    ):  # rounds have prompts of their own
        assert (first_prompt[:512] != different).mean() > 0.9
    assert workload.items[0].prompt_token_ids == tuple(first_prompt)
    assert first_prompt.min() >= 17
    assert first_prompt.max() < 5000
    another_seed = make(spec, MOONCAKE, seed=4, vocab=5000).items[0].prompt_token_ids
    assert (first_prompt != np.asarray(another_seed)).any()


def test_a_simulated_run_finds_the_prefixes_of_a_mooncake_trace(tmp_path):
    (tmp_path / "m.jsonl").write_text(MOONCAKE, encoding="utf-8")
    workload = {"kind": "mooncake", "file": "m.jsonl"}
    engine = {"max_num_batched_tokens": 2048, "max_model_len": 2048, "max_num_seqs": 4}
    raw = {**BASE, "engine": engine, "cache_tokens": 8192, "workload": workload}
    summary = simulated_run(raw, tmp_path).summary
    assert summary["prefix_hit_share"] == pytest.approx(1024 / (1100 + 512 + 1030))


@pytest.mark.parametrize(
    ("spec", "content", "message"),
    [
        (ShareGPT("sharegpt", "f"), "{", r"^f is not JSON: .*ShareGPT_V3"),
        (ShareGPT("sharegpt", "f"), "{}", r"^f holds no list of conversations"),
        (ShareGPT("sharegpt", "f"), "[3]", r'^f, entry 0: needs "conversations"'),
        (
            ShareGPT("sharegpt", "f"),
            '[{"conversations": [{"from": "human"}]}]',
            r"^f, entry 0: a message is \{'from': 'human'\}; it needs",
        ),
        (ShareGPT("sharegpt", "f"), "[]", r"^f has no conversation that begins with"),
        (
            BurstGPT("burstgpt", "f"),
            "Timestamp,Model\n",
            r"^f has no column Request tokens, .*BurstGPT_1",
        ),
        (
            BurstGPT("burstgpt", "f"),
            BURSTS.replace("5,ChatGPT", "x,ChatGPT", 1),
            r"^f, line 2: Timestamp is 'x'; it must be seconds",
        ),
        (
            BurstGPT("burstgpt", "f"),
            BURSTS.replace("472", "-1"),
            r"^f, line 2: Request tokens is '-1'; it must be a number of tokens",
        ),
        (
            BurstGPT("burstgpt", "f", model="GPT-5"),
            BURSTS,
            r"^workload\.model is 'GPT-5'; f has \['ChatGPT', 'GPT-4'\]; name one of them",
        ),
        (
            BurstGPT("burstgpt", "f", model="GPT-4", log_type="Conversation log"),
            BURSTS,
            r"^f has no requests after workload\.offset 0",
        ),
        (Mooncake("mooncake", "f"), "", r"^f has no requests after workload\.offset 0"),
        (Mooncake("mooncake", "f"), "x", r"^f, line 1 is not JSON: .*Mooncake"),
        (
            Mooncake("mooncake", "f"),
            MOONCAKE.replace("1100", "0"),
            r"^f, line 1: input_length is 0; it must be a number of tokens, at least 1",
        ),
        (
            Mooncake("mooncake", "f"),
            MOONCAKE.replace("1100", "1100.5"),
            r"^f, line 1: input_length is 1100\.5; it must be an integer, such as 472",
        ),
        (
            Mooncake("mooncake", "f"),
            MOONCAKE.replace("[3]", "[3, 4]"),
            r"^f, line 3: hash_ids is \[3, 4\]; a prompt of 512 tokens has 1 integers",
        ),
    ],
)
def test_a_file_that_is_none_names_its_place(spec, content, message):
    with pytest.raises(ValueError, match=message):
        check(spec, content)


def test_a_missing_file_says_where_there_is_one(tmp_path):
    for kind, name in (
        ("sharegpt", "ShareGPT_V3"),
        ("burstgpt", "BurstGPT_1"),
        ("mooncake", "conv"),
    ):
        with pytest.raises(ValueError, match=rf"there is no file .*no\.txt.*{name}"):
            expand({**BASE, "workload": {"kind": kind, "file": "no.txt"}}, folder=tmp_path)


def test_pieces_are_the_tokens_of_a_prompt_by_their_blocks():
    prompt = BlockIds((7, 8, 9), 1100, (0, 100), (1,))
    assert prompt.pieces == [(7, 0, 512), (8, 0, 512), (9, 0, 76)]
    remainder = prompt.after(600)
    assert remainder.pieces == [(8, 88, 512), (9, 0, 76)]
    whole_blocks = {block: BlockIds((block,), 512, (0, 100), (1,)) for block in (8, 9)}
    tokens = [
        token
        for block, start, end in remainder.pieces
        for token in tuple(whole_blocks[block])[start:end]
    ]
    assert tokens == list(remainder)
