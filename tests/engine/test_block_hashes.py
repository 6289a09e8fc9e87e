"""The root of block hashes: salts and tags separate requests, and hashes without tags never change."""

from __future__ import annotations

import itertools

import pytest

from pagedjax import SamplingParams
from pagedjax.engine.block_hashes import root

SALTS = (None, "a", "b", "ab", "['a']", '["a"]')
TAGS = (
    (),
    ("",),
    ("a",),
    ("b",),
    ("a", "b"),
    ("b", "a"),
    ("ab",),
    ("a", ""),
    ("", "a"),
    ("a,b",),
    ('a", "b',),
    ("tag",),
)


def test_different_salts_tags_or_block_sizes_never_share_a_root():
    roots = [root(*arguments) for arguments in itertools.product(SALTS, (4, 16), TAGS)]
    assert len(set(roots)) == len(roots) == 2 * len(SALTS) * len(TAGS)


@pytest.mark.parametrize(
    ("salt", "size", "expected"),
    [
        (None, 16, "4a6368bec023b268baff30d75476c9e1"),
        ("salt", 4, "7d25a0f6ee83a860a3676f810c2a2976"),
    ],
)
def test_a_root_without_tags_is_fixed(salt, size, expected):
    assert root(salt, size) == root(salt, size, ()) == root(salt, size, []) == expected


def test_an_empty_salt_is_no_salt():
    assert root("", 16) == root(None, 16)


def test_an_engine_shares_blocks_between_equal_tags_only(tiny_llm):
    engine, prompt = tiny_llm.engine, [3 + i % 7 for i in range(40)]
    cached = {}
    for name, tags in (("first", ("x",)), ("same", ("x",)), ("other", ("y",)), ("none", ())):
        engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=1), tags=tags)
        while engine.has_work:
            plan = engine.step().plan
            cached |= dict(zip(plan.admitted, plan.cached, strict=True))
    assert cached["same"] > 0
    assert cached == {"first": 0, "same": cached["same"], "other": 0, "none": 0}
