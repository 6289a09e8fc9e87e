"""A drawing shows the scheduler's state: every entry of a block table, and every block of the
pool.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

from hypothesis import strategies as st

from pagedjax.host import blocks, scheduler
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Request
from pagedjax.viewer import drawing
from tests import drawn
from tests.host.scheduler_steps import crowded, request, start, step
from tests.refusals import refused
from tests.viewer.runs import any_run

SVG = "{http://www.w3.org/2000/svg}"


def groups(picture: drawing.Drawing, kind: str) -> list[dict[str, str]]:
    """The attributes of the picture's groups of one class, in its order."""
    return [
        dict(g.attrib) for g in ET.fromstring(picture.svg).iter(f"{SVG}g") if g.get("class") == kind
    ]


def texts(picture: drawing.Drawing) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture.svg).iter(f"{SVG}text")]


def check(state: SchedulerState) -> None:
    """Compares a drawing with the state, whose lists of free and idle blocks are computed apart
    from it.
    """
    picture = drawing.draw(state)
    active = scheduler.running(state)
    size = state.config.block_size
    layers = state.config.groups
    entries = groups(picture, "entry")
    tables = [(seq.request_id, block) for seq in active for block in seq.blocks]
    assert Counter((e["data-sequence"], int(e["data-block"])) for e in entries) == Counter(tables)
    for seq in active:
        of_seq = [e for e in entries if e["data-sequence"] == seq.request_id]
        room = len(of_seq) // layers * size
        for name, count in (("data-computed", seq.computed), ("data-known", seq.length)):
            assert sum(int(e[name]) for e in of_seq) == min(count, room) * layers
    states = dict.fromkeys(range(state.config.num_blocks + 1), "owned")
    states |= dict.fromkeys(blocks.free_ids(state.pool), "empty")
    states |= dict.fromkeys(blocks.idle_ids(state.pool), "idle")
    states[0] = "trash"
    pool = {int(g["data-block"]): g for g in groups(picture, "block")}
    assert {block: g["data-state"] for block, g in pool.items()} == states
    for block, g in pool.items():
        assert int(g["data-owners"]) == state.pool.owners.get(block, 0)


@drawn.examples(8, 60)
def test_a_drawing_shows_every_state_of_a_run(tmp_path, number):
    def holds(seed: int, num_blocks: int) -> None:
        for transition in any_run(tmp_path / "run.jsonl", seed, num_blocks)[::7]:
            check(transition.state)

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(8, 40))


def test_a_chunk_is_pale_until_its_step_is_committed():
    state, plan = scheduler.schedule(start(request("a", 6)), FCFS)
    first = groups(drawing.draw(state), "entry")
    assert [(e["data-known"], e["data-computed"]) for e in first] == [("4", "0"), ("2", "0")]
    state, _ = scheduler.commit(state, plan, [7])
    after = groups(drawing.draw(state), "entry")
    assert [(e["data-known"], e["data-computed"]) for e in after] == [("4", "4"), ("3", "2")]


def test_a_shared_block_has_the_colours_of_its_owners():
    first = Request("a", 9, 8, hashes=("x", "y"))
    state, *_ = step(start(first, first._replace(request_id="b"), num_blocks=9))
    shared = {g["data-block"]: g["data-owners"] for g in groups(drawing.draw(state), "block")}
    assert shared["1"] == shared["2"] == "2"
    svg = drawing.draw(state).svg
    # blocks 1 and 2 of both, and one of its own
    assert svg.count(drawing.colour(0, light=0.75)) == 3
    assert svg.count(drawing.colour(1, light=0.75)) == 3


def test_the_queue_is_written_in_words_and_cut_off():
    assert "waiting: d (1 tokens)" in texts(drawing.draw(crowded()))
    state = start(*(request(f"r{i}", 3) for i in range(8)))
    assert texts(drawing.draw(state))[0].endswith("r5 (3 tokens) and 2 more")
    assert texts(drawing.draw(start()))[0] == "waiting: no sequence"


def test_any_name_of_a_request_gives_well_formed_xml():
    state, *_ = step(start(request('<a & "b">\x00\x1f', 3)))
    assert groups(drawing.draw(state), "entry")[0]["data-sequence"] == '<a & "b">??'


def test_windows_of_layers_have_a_line_for_each_group_and_holes():
    state = scheduler.init(
        SchedulerConfig(
            block_size=4,
            num_blocks=32,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=64,
            views=(View(), View(window=2)),
        )
    )
    state = scheduler.submit(state, Request("a", 30, 4))
    state, *_ = step(state)
    check(state)
    assert "hole" in texts(drawing.draw(state))


def test_a_notebook_shows_a_drawing():
    picture = drawing.draw(crowded())
    assert picture._repr_svg_() == picture.svg
    assert picture.svg.startswith("<svg ")


def test_too_many_blocks_are_refused_with_the_remedy():
    message = "the pool has 5000 blocks, and a drawing shows at most 1024; draw a smaller engine, or record the run"
    with refused(message):
        drawing.draw(start(num_blocks=5000))


def test_too_many_entries_of_shared_blocks_are_refused_too():
    request = Request("a", 700, 4, hashes=tuple(map(str, range(700))))
    sizes = {"block_size": 1, "num_blocks": 1024, "budget": 2048, "model_len": 1000}
    state, *_ = step(start(request, request._replace(request_id="b"), **sizes))
    with refused("the block tables have 1400 blocks, and a drawing shows at most 1024"):
        drawing.draw(state)


def test_colours_are_hexadecimal_and_differ_between_neighbours():
    colours = [drawing.colour(i) for i in range(20)]
    assert len(set(colours)) == 20
    assert all(len(c) == 7 and int(c[1:], 16) >= 0 for c in colours)
