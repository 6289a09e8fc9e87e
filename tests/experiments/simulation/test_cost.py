"""The cost model: against a count token by token, and against published numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation.collectives import Network
from experiments.simulation.cost import (
    CHIPS,
    SHAPES,
    Chip,
    Roofline,
    Shape,
    Simulate,
    Work,
    fit,
    of_mesh,
    part,
    shape_of,
    work_of,
)
from pagedjax.host.kv_policies import View
from pagedjax.host.types import EMPTY_PLAN, Request, SchedulerConfig, Seq
from pagedjax.options.config import MeshConfig
from pagedjax.weights.locate import open_checkpoint

rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=6
)


def plan_of(rows):
    """Of (start, count, whether the chunk ends its sequence)."""
    seqs = tuple(Seq(Request(str(i), 1, 1), i, 100, 1) for i in range(len(rows)))
    starts, counts, _ = zip(*rows, strict=True)
    lengths = tuple(start + count + (not ends) for start, count, ends in rows)
    return EMPTY_PLAN._replace(seqs=seqs, starts=starts, counts=counts, lengths=lengths)


@given(rows)
def test_work_matches_token_by_token_count(rows):
    work = work_of(plan_of(rows), 100)
    tokens = [
        (i, at) for i, (start, count, _) in enumerate(rows) for at in range(start, start + count)
    ]
    assert work.pairs == sum(at + 1 for _, at in tokens)
    assert work.context == sum(max(at + 1 for j, at in tokens if j == i) for i in range(len(rows)))
    assert work[:3] == (100, len(rows), sum(ends for *_, ends in rows))


@given(rows, st.integers(1, 5), st.integers(1, 3), st.sets(st.integers(0, 4), max_size=2))
def test_work_under_a_kv_policy_matches_token_by_token_count(rows, size, window, kept_blocks):
    view = View(window, tuple(sorted(kept_blocks)))
    work = work_of(plan_of(rows), 100, config=SchedulerConfig(size, 64, 64, 8, 64, views=(view,)))

    def seen(at: int) -> set[int]:
        return {
            t for t in range(at + 1) if t // size > at // size - window or t // size in kept_blocks
        }

    visible = [[seen(at) for at in range(start, start + count)] for start, count, _ in rows]
    assert work.pairs == sum(len(tokens) for row in visible for tokens in row)
    assert work.context == sum(len(set.union(*row)) for row in visible)
    assert work[:3] == (100, len(rows), sum(ends for *_, ends in rows))


@given(rows)
def test_without_cache_every_token_is_computed_again(rows):
    plan = plan_of(rows)
    recomputed = plan_of([(0, start + count, ends) for start, count, ends in rows])
    bare = work_of(plan, plan.num_tokens, cached=False)
    assert bare == work_of(recomputed, recomputed.num_tokens)


def test_shapes_have_the_published_sizes():
    billions = {
        "opt-13b": 12.85,
        "opt-66b": 65.7,
        "opt-175b": 174.6,
        "llama-3-8b": 8.03,
        "llama-3-70b": 70.6,
        "llama-3.1-70b": 70.6,
    }
    billions |= {"mistral-7b": 7.24, "yi-34b": 34.4, "tinyllama-1.1b": 1.10, "gpt2-xl": 1.56}
    billions |= {"smollm2-135m": 0.1345, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.77}
    for name, size in billions.items():
        shape = SHAPES[name]
        assert shape.total_bytes / shape.weight_bytes / 1e9 == pytest.approx(size, rel=0.01), name
    # PagedAttention, section 3: "the KV cache of a single token demands 800 KB" of OPT-13B
    assert SHAPES["opt-13b"].token_bytes == 800 * 1024
    assert SHAPES["tinyllama-1.1b"].token_bytes == 22 * 1024
    assert SHAPES["gpt2-xl"].token_bytes == 307_200


def test_shape_is_read_from_checkpoint_config():
    assert shape_of(open_checkpoint("smollm2-135m").config) == SHAPES["smollm2-135m"]
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    assert shape_of(gpt2) == SHAPES["gpt2-xl"]


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}


@pytest.mark.parametrize(
    ("config", "total", "used"),
    [(MIXTRAL, 46.7, 12.9), (QWEN, 30.5, 3.3), (GEMMA, 2.61, 2.61)],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "Gemma-2-2B"],
)
def test_models_of_every_family_have_the_published_sizes(config, total, used):
    """All numbers, and those that a token uses (with experts, the chosen ones). Gemma's embedding
    is its head.
    """
    shape = shape_of(config)
    assert shape.total_bytes / shape.weight_bytes / 1e9 == pytest.approx(total, rel=0.01)
    embedding = 0 if shape.tied else shape.head_numbers
    assert (shape.products(1, 1) / 2 + embedding) / 1e9 == pytest.approx(used, rel=0.02)


def test_layers_without_experts_keep_their_mlp():
    every, half = (shape_of(QWEN | {"decoder_sparse_step": step}) for step in (1, 2))
    assert (every.sparse, half.sparse) == (48, 24)
    mlp = 3 * 2048 * 6144
    mixture = 2048 * 128 + 128 * 3 * 2048 * 768
    assert half.layer_numbers(128) == every.layer_numbers(128) + 24 * (mlp - mixture)


def test_step_reads_experts_chosen_by_some_token():
    shape = shape_of(MIXTRAL)
    assert shape.experts_read(1) == pytest.approx(2)
    draw = np.random.default_rng(0)
    chosen = [
        len({e for _ in range(3) for e in draw.choice(8, 2, replace=False)}) for _ in range(4000)
    ]
    assert shape.experts_read(3) == pytest.approx(np.mean(chosen), rel=0.02)
    all_read = shape.read_bytes(10_000)
    assert all_read == pytest.approx(shape.total_bytes - shape.weight_bytes * shape.head_numbers)
    seconds = Roofline(shape, Chip(1.0, 1e30, 0.0, launch=0.0))(
        Work(tokens=1, sequences=1, sampled=1, context=0, pairs=0)
    )
    expert = shape.weight_bytes * 3 * 4096 * 14336
    assert seconds == pytest.approx(all_read - 32 * 6 * expert), (
        "two of eight experts in each layer"
    )


def test_unsupported_model_has_no_shape():
    with pytest.raises(ValueError, match="model_type is 'mamba'; supported: llama"):
        shape_of({**MIXTRAL, "model_type": "mamba"})


SMALL = Shape(2, 8, 2, 1, 4, 16, 100, 64)
CHIP = Chip(bandwidth=1000.0, rate=1e6, memory=1e6, launch=0.5)


def test_roofline_matches_hand_calculation():
    # a layer: q 8 x 8, k and v 8 x 4, out 8 x 8, three matrices of 8 x 16; a head of 8 x 100
    numbers = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 100
    assert SMALL.read_bytes(1) == 2 * numbers == 2 * 1952
    work = Work(tokens=3, sequences=3, sampled=3, context=30, pairs=30)
    traffic = 2 * numbers / 1000 + 30 * (2 * 2 * 2 * 4) / 1000  # both bound by memory
    assert Roofline(SMALL, CHIP)(work) == pytest.approx(0.5 + traffic)
    work = Work(tokens=3000, sequences=1, sampled=1, context=3000, pairs=4_501_500)
    arithmetic = 2 * (1152 * 3000 + 800) / 1e6 + 4 * 2 * 2 * 4 * 4_501_500 / 1e6
    assert Roofline(SMALL, CHIP)(work) == pytest.approx(0.5 + arithmetic)
    assert Roofline(SMALL, CHIP, chips=2)(work) == pytest.approx(0.5 + arithmetic / 2)
    assert Roofline(SMALL, CHIP, rate_share=0.5)(work) == pytest.approx(0.5 + 2 * arithmetic)


def test_roofline_rounds_tokens_up_to_tiles():
    chip = CHIP._replace(bandwidth=1e12, tile=128)
    at, past = (
        Roofline(SMALL, chip)(Work(tokens=n, sequences=1, sampled=0, context=0, pairs=0))
        - chip.launch
        for n in (256, 257)
    )
    assert past / at == pytest.approx(384 / 256)


def test_block_moves_cost_one_or_many_copies():
    chip = CHIP._replace(link=1e6, transfer=1e-3)
    copies, single_copy = (
        Roofline(SMALL, chip, block_size=4, batched_moves=batched).move(10)
        for batched in (False, True)
    )
    content = 10 * 4 * SMALL.token_bytes / 1e6
    assert single_copy == pytest.approx(1e-3 + content)
    assert copies == pytest.approx(2 * 2 * 10 * 1e-3 + content)


# --- a mesh ---------------------------------------------------------------------------------------

TORUS = Network(1e5, neighbours=True, devices=8, hop=1e-3)


def test_part_of_a_small_model_is_counted_by_hand():
    """SMALL on two devices: one query head and a copy of the key head each, half the MLP and of the
    vocabulary.
    """
    device_part = part(SMALL, MeshConfig(tensor=2))
    assert device_part == SMALL._replace(heads=1, kv_heads=1, intermediate=8, vocabulary=50)
    layer = 8 * 4 + 2 * 8 * 4 + 4 * 8 + 3 * 8 * 8  # q, k and v, out, three matrices
    assert device_part.total_bytes == 2 * (2 * layer + 2 * 8 * 50)
    assert device_part.token_bytes == SMALL.token_bytes, "the key head is on both"


def test_part_has_padded_heads_and_widths():
    """SmolLM2's 9 heads, 3 key heads and vocabulary on 2 devices: 2 key heads each, with their
    groups of 3.
    """
    device_part = part(SHAPES["smollm2-135m"], MeshConfig(tensor=2))
    assert (device_part.heads, device_part.kv_heads) == (6, 2)
    assert (device_part.intermediate, device_part.vocabulary) == (768, 24576)


def test_part_of_llama_70b_is_an_eighth():
    shape = SHAPES["llama-3-70b"]
    device_part = part(SHAPES["llama-3-70b"], MeshConfig(tensor=8))
    assert 8 * device_part.total_bytes == shape.total_bytes
    assert 8 * device_part.token_bytes == shape.token_bytes
    assert part(shape, MeshConfig(tensor=16)).token_bytes == device_part.token_bytes, (
        "8 key heads, each twice"
    )


def test_experts_are_dealt_over_the_axis_expert():
    """Mixtral on 4 x 2: two of eight experts on a device, half of their width; the router is
    whole.
    """
    shape = shape_of(MIXTRAL)
    device_part = part(shape_of(MIXTRAL), MeshConfig(tensor=2, expert=4))
    assert (device_part.heads, device_part.kv_heads) == (4, 1)
    assert (device_part.expert, device_part.dealt, device_part.experts) == (7168, 4, 8)
    attention = 4096 * 128 * 2 * (4 + 1)
    router = 4096 * 8
    expert = 3 * 4096 * 7168
    assert device_part.layer_numbers(8) == 32 * (attention + router + 2 * expert)
    assert device_part.experts_read(5) == shape.experts_read(5)
    assert device_part.products(1, 0) == 2 * 32 * (attention + router + 2 / 4 * expert), (
        "an equal share of the tokens"
    )


works = st.builds(
    Work,
    tokens=st.integers(1, 300),
    sequences=st.just(1),
    sampled=st.integers(0, 64),
    context=st.integers(0, 10_000),
    pairs=st.integers(0, 100_000),
    moved_blocks=st.integers(0, 3),
)


@given(work=works, name=st.sampled_from(sorted(SHAPES)), chip=st.sampled_from(sorted(CHIPS)))
def test_mesh_of_one_device_is_no_mesh(work, name, chip):
    roofline = Roofline(SHAPES[name], CHIPS[chip])
    assert part(SHAPES[name], MeshConfig()) == SHAPES[name]
    assert of_mesh(roofline, MeshConfig())(work) == roofline(work)


@given(work=works, n=st.sampled_from([2, 4, 8]))
def test_mesh_without_exchanges_is_ideal_where_all_divides(work, n):
    shape = SHAPES["llama-3-8b"]
    free = CHIPS["h100"]._replace(network=Network(1e30, False, 8))
    mesh = of_mesh(Roofline(shape, free), MeshConfig(tensor=n))
    ideal = Roofline(shape, free, chips=n)
    work = work._replace(moved_blocks=0)  # the link to the host is each device's own
    assert mesh(work) == pytest.approx(ideal(work), rel=1e-12)


@given(work=works, n=st.sampled_from([2, 3, 4, 8, 16]), factor=st.integers(1, 100))
def test_mesh_of_more_work_or_slower_links_is_never_faster(work, n, factor):
    mesh = of_mesh(Roofline(SHAPES["llama-3-70b"], CHIPS["tpu-v5e"]), MeshConfig(tensor=n))
    slow = mesh.chip._replace(
        network=mesh.chip.network._replace(bandwidth=mesh.chip.network.bandwidth / factor)
    )
    assert mesh(work) <= mesh._replace(chip=slow)(work)
    assert mesh(work) >= mesh._replace(devices=1)(work), "exchanges take time"
    for name in ("tokens", "sampled", "context", "pairs"):
        assert mesh(work) <= mesh(work._replace(**{name: getattr(work, name) + factor}))


def test_exchanges_of_a_small_model_are_counted_by_hand():
    """2 devices, 3 tokens, 2 samples: five sums of [8, 3], logits [50, 2], sampled [2, 43]; a link
    of 1e5 bytes/s.
    """
    mesh = of_mesh(Roofline(SMALL, CHIP._replace(network=TORUS)), MeshConfig(tensor=2))
    work = Work(tokens=3, sequences=2, sampled=2, context=0, pairs=0)
    sums = 4 * 8 * 3 * 4 + 8 * 3 * 2  # two a layer in float32, and the embedding's in 16 bits
    moved = sums * 2 / 2 + 50 * 2 * 4 / 2 + 2 * 43 * 4 / 2
    hops = 5 * 2 + 1 + 1
    assert mesh.exchange(work) == pytest.approx(moved / 1e5 + hops * 1e-3)
    assert mesh(work) == pytest.approx(mesh._replace(devices=1)(work) + mesh.exchange(work))


@pytest.mark.parametrize(
    ("mesh", "model", "message"),
    [
        (
            MeshConfig(expert=2),
            "llama-3-8b",
            r"mesh.expert is 2, and the model has no experts; use mesh.tensor",
        ),
        (
            MeshConfig(tensor=16),
            "smollm2-135m",
            r"mesh has 16 devices, and the model 9 heads; use at most 9 devices",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused(mesh, model, message):
    with pytest.raises(ValueError, match=message):
        of_mesh(Roofline(SHAPES[model], CHIPS["tpu-v5e"]), mesh)


def test_chip_without_known_links_has_no_mesh(monkeypatch):
    message = r"mesh has 2 devices, and the bandwidth between chips of {} is not known; use one of .*h100.*chips=2"
    with pytest.raises(ValueError, match=message.format("the chip")):
        of_mesh(Roofline(SMALL, CHIP), MeshConfig(tensor=2))
    monkeypatch.setitem(CHIPS, "lonely", CHIP)
    with pytest.raises(ValueError, match=message.format("lonely")):
        Simulate(chip="lonely", mesh={"tensor": 2})
    assert Simulate(chip="lonely", mesh={"tensor": 1}).mesh == MeshConfig()


def test_links_of_a_chip_are_those_of_its_data_sheet():
    """Bytes/s of all links of a chip in both directions: NVIDIA's data sheets, Google Cloud's
    pages, Jouppi et al.
    """
    links = {"tpu-v4": 6, "tpu-v5e": 4, "tpu-v5p": 6, "tpu-v6e": 4, "tpu7x": 6}
    sheets = {"a100-40g": 600e9, "a100-80g": 600e9, "h100": 900e9, "h200": 900e9}
    sheets |= {"tpu-v4": 600e9, "tpu-v5e": 400e9, "tpu-v5p": 1200e9}
    sheets |= {"tpu-v6e": 800e9, "tpu7x": 1200e9}
    assert sheets.keys() == CHIPS.keys() - {"a10g"}, "an A10G has no links but those of its host"
    for name, bytes_per_s in sheets.items():
        network = CHIPS[name].network
        assert 2 * network.bandwidth * links.get(name, 1) == bytes_per_s, name
        assert network.neighbours == (name in links)


def measured_steps(count=60, noise=0.0, seed=0):
    """Steps of a device whose times are known: by bucket, and so much a token of context and a
    pair.
    """
    draw = random.Random(seed)
    base = {8: 0.010, 32: 0.012, 128: 0.030}
    steps = []
    for _ in range(count):
        size = draw.choice(sorted(base))
        context = draw.randrange(1000)
        pairs = draw.randrange(100_000)
        seconds = (base[size] + 2e-6 * context + 3e-8 * pairs) * (1 + draw.uniform(-noise, noise))
        steps.append(
            {"padded_tokens": size, "context_tokens": context, "pairs": pairs, "seconds": seconds}
        )
    return steps


def test_fit_recovers_known_coefficients():
    fitted = fit(measured_steps())
    assert fitted.sizes == (8, 32, 128)
    assert fitted.seconds == pytest.approx((0.010, 0.012, 0.030), rel=1e-6)
    assert (fitted.per_context, fitted.per_pair) == pytest.approx((2e-6, 3e-8), rel=1e-6)
    assert fitted.error < 1e-9
    assert fitted(
        Work(tokens=32, sequences=4, sampled=4, context=500, pairs=1000)
    ) == pytest.approx(0.012 + 1e-3 + 3e-5)
    assert fitted(Work(tokens=80, sequences=4, sampled=4, context=0, pairs=0)) == pytest.approx(
        (0.012 + 0.030) / 2
    )
    assert fitted(Work(tokens=256, sequences=4, sampled=4, context=0, pairs=0)) == pytest.approx(
        0.060
    )


def test_fit_of_noisy_steps_reports_its_error():
    fitted = fit(measured_steps(400, noise=0.1))
    assert fitted.seconds == pytest.approx((0.010, 0.012, 0.030), rel=0.05)
    assert 0.02 < fitted.error < 0.08


def test_fit_refuses_too_few_or_old_steps():
    with pytest.raises(ValueError, match="3 steps; it takes at least 8"):
        fit(measured_steps(3))
    old = [{k: v for k, v in step.items() if k != "pairs"} for step in measured_steps()]
    with pytest.raises(ValueError, match="measure it again"):
        fit(old)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, r"needs one of chip .* and step_s"),
        ({"chip": "h20"}, "chip is 'h20'.*h200"),
        ({"chip": "h200", "model": "opt-13"}, "model is 'opt-13'.*did you mean 'opt-13b'"),
        (
            {"chip": "h200", "rate_share": 1.5},
            "rate_share is 1.5; it must be above 0 and at most 1",
        ),
        (
            {"fit": "runs/x", "chips": 2},
            "chips is 2, and measured steps .* leave it out, or give a chip",
        ),
        ({"chip": "h200", "chips": 0}, "chips is 0; it must be at least 1"),
        ({"chip": "h200", "draft_s": -1.0}, "draft_s is -1.0; it must be at least 0 seconds"),
        (
            {"chip": "h200", "mesh": {"tensor": 2}, "hop_s": -1.0},
            "hop_s is -1.0; it must be at least 0 seconds",
        ),
        ({"chip": "h200", "host_s": -1.0}, "host_s is -1.0; it must be at least 0 seconds"),
        (
            {"chip": "h200", "mesh": {"data": 2}},
            r"unknown key simulate.mesh.'data'; known keys are tensor, expert",
        ),
        (
            {"chip": "h200", "mesh": {"tensor": 16}},
            "mesh has 16 devices, and the links of h200 connect at most 8 chips",
        ),
        (
            {"chip": "h200", "chips": 2, "mesh": {"tensor": 2}},
            "chips is 2 and mesh is tensor 2; leave chips out",
        ),
        ({"step_s": 1.0, "mesh": {"tensor": 2}}, "mesh is tensor 2, and a constant step"),
        (
            {"chip": "h200", "hop_s": 1e-6},
            "hop_s is 1e-06, and without a mesh nothing is exchanged; set mesh",
        ),
        ({"step_s": 0.0}, r"step_s is 0.0; it must be above 0 seconds"),
        (
            {"step_s": 1.0, "chips": 2},
            r"chips is 2, and a constant step \(step_s\) does not depend on it; leave it out",
        ),
        (
            {"profile": "distserve/opt-13b/tp2"},
            "profile is '.*', whose coefficients count real tokens, and padded is true; "
            "set it to false",
        ),
        (
            {"profile": "opt", "padded": False},
            "profile is 'opt'; it must be one of 'distserve/opt-13b/tp1",
        ),
        (
            {"profile": "distserve/opt-13b/tp2", "padded": False, "chips": 2},
            "chips is 2, and a profile does not depend on it; leave it out",
        ),
        ({"chip": "h100", "acceptance": 1.5}, "acceptance is 1.5; it must be"),
    ],
)
def test_simulate_section_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Simulate(**wrong)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"chip": "a100-80g", "chips": 2}, "simulated a100-80g x 2"),
        (
            {"chip": "h100", "mesh": {"tensor": 2, "expert": 4}},
            "simulated h100, tensor 2, expert 4",
        ),
        ({"fit": "somewhere"}, "simulated, fitted"),
        (
            {"profile": "distserve/opt-13b/tp2", "padded": False},
            "simulated, distserve/opt-13b/tp2",
        ),
    ],
)
def test_simulated_device_names(fields, name):
    assert Simulate(**fields).name == name
