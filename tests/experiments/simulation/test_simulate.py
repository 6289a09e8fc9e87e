"""The simulated engine: the same plans and events as a real engine, in virtual time."""

from __future__ import annotations

import json
from operator import attrgetter

import numpy as np
import pytest

from experiments import run
from experiments.core import store
from experiments.core.config import expand
from experiments.core.drive import drive, measure
from experiments.core.records import request_records, step_records
from experiments.core.workloads import WorkItem
from experiments.simulation.cost import CHIPS, SHAPES, Simulate
from experiments.simulation.simulate import Guess, SimulatedEngine, SimulatedLLM, resolved
from pagedjax import LLM, SamplingParams
from pagedjax.host.replay import verify
from pagedjax.host.types import Verified
from pagedjax.options.config import EngineConfig
from tests.experiments.core.summaries import BASE, GREEDY, changed_workload

RAW = {**BASE, "workload": changed_workload(count=12)}


def items(count, seed=0, gap=0.0):
    draw = np.random.default_rng(seed)
    # some prompts begin alike, so that blocks are shared
    common = tuple(draw.integers(20, 300, 12).tolist())
    return tuple(
        WorkItem(
            f"r{i}",
            i * gap,
            (common if i % 3 else ())
            + tuple(draw.integers(20, 300, int(draw.integers(1, 40))).tolist()),
            int(draw.integers(1, 24)),
        )
        for i in range(count)
    )


COLUMNS = attrgetter(
    "preempted",
    "tokens",
    "sequences",
    "blocks_used",
    "blocks_listed",
    "held_tokens",
    "padded_tokens",
    "context_tokens",
    "pairs",
)


MLFQ = "mlfq(patience=20, quantum=1, ratio=2)"


@pytest.mark.default_cases(
    "{'num_blocks': 20}",
    f"{{'num_blocks': 20, 'policy': '{MLFQ}'}}",
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "policy": "shortest"},
        {"num_blocks": 20},
        {"num_blocks": 20, "policy": MLFQ},
        {"chunked_prefill": False, "max_num_batched_tokens": 128, "token_buckets": (128,)},
        {"mixed_steps": False},
        {
            "mixed_steps": False,
            "chunked_prefill": False,
            "max_num_batched_tokens": 128,
            "token_buckets": (128,),
        },
        {"kv_policy": {"name": "streaming", "sinks": 4, "window": 9}},
        {"reservation": "pow2", "enable_prefix_caching": False},
        {"reservation": "max", "enable_prefix_caching": False, "policy": "static"},
    ],
    ids=str,
)
def test_simulated_plans_match_real_engine(tiny, options):
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 6, "max_model_len": 96}
    settings |= {"max_num_batched_tokens": 32, "token_buckets": (32,), **options}
    real = LLM(tiny, progress=False, **settings).engine
    simulated = SimulatedEngine(
        EngineConfig(**settings),
        lambda work: 0.01,
        vocab_size=320,
        simulate=Simulate(chip="h200", model="opt-13b"),
    )
    work = items(14)
    histories = []
    for engine in (real, simulated):
        start, results = drive(engine, work, GREEDY)
        steps = step_records(results, start, 4, engine.scheduler_state.config)
        plans = [
            (r.plan.counts, r.plan.starts, [seq.blocks for seq in r.plan.seqs]) for r in results
        ]
        histories.append(([COLUMNS(step) for step in steps], plans))
    assert histories[0] == histories[1]
    assert options.get("num_blocks") is None or sum(row[0] for row in histories[0][0]) > 0


def engine_of(simulate: Simulate, time=lambda work: 0.25, **options) -> SimulatedEngine:
    """An engine whose steps take 0.25 s on the device, if no other time is given."""
    sizes = {"max_model_len": 64, "num_blocks": 32, "token_buckets": (2048,)}
    config = EngineConfig(**{**sizes, **options})
    return SimulatedEngine(config, time, vocab_size=1000, simulate=simulate)


@pytest.mark.parametrize(
    "policy", ["vtc", MLFQ, "srtf(margin=1)", "deadline", "early_rejection(ttft_s=0.3)"]
)
def test_simulated_recordings_of_policies_with_memory_replay_byte_for_byte(policy, tmp_path):
    engine = engine_of(Simulate(chip="h200"), policy=policy, max_num_seqs=2)
    path = tmp_path / "run.jsonl"
    engine.record(path)
    rejected = 0
    for number in range(9):
        prompt = [3] * (4 + number)
        params = SamplingParams(max_tokens=12 - number, ignore_eos=True)
        user = "xyz"[number % 3]
        engine.add(f"r{number}", prompt, params, user=user, predicted=40 - 4 * number)
        result = engine.step()
        assert result is not None
        rejected += len(result.plan.rejected)
    while engine.has_work:
        engine.step()
    engine.record(None)
    report = verify(path)
    assert report.identical, report.difference
    assert report.requests == 9
    assert sum(report.finished.values()) == 9
    assert (report.preemptions > 0) == policy.startswith(("mlfq", "srtf"))
    assert report.finished.get("rejected", 0) == rejected
    assert (rejected > 0) == policy.startswith("early_rejection")
    assert ('"now":0.25' in path.read_text()) == policy.startswith(("deadline", "early"))


def test_virtual_time_is_steps_plus_idle_gaps():
    engine = engine_of(Simulate(chip="h200", host_s=0.05))
    work = [WorkItem("a", 0.0, (20,) * 5, 3), WorkItem("b", 10.0, (20,) * 5, 2)]
    start, results = drive(engine, work, GREEDY, engine.clock, engine.sleep)
    assert start == 0.0
    assert [result.finished - result.started for result in results] == pytest.approx([0.3] * 5)
    starts = [result.started for result in results]
    assert starts == pytest.approx([0.0, 0.3, 0.6, 10.0, 10.3], abs=0.051)
    assert {result.device_seconds for result in results} == {0.25}
    assert starts[3] >= 10.0


def test_whole_batch_is_computed_until_its_last_member_ends():
    """Three requests, two places: against the work of each step counted by hand."""
    works = []
    engine = engine_of(
        Simulate(chip="h200", whole_batches=True),
        lambda work: works.append(work) or 1.0,
        token_buckets=(8, 2048),
        max_num_seqs=2,
        policy="static",
        mixed_steps=False,
    )
    work = [
        WorkItem("a", 0.0, (20,) * 5, 1),
        WorkItem("b", 0.0, (20,) * 3, 4),
        WorkItem("c", 0.0, (20,) * 2, 2),
    ]
    start, results = drive(engine, work, GREEDY, engine.clock, engine.sleep)
    records = request_records(results, work, start)
    assert [(record.ttft, record.e2e) for record in records] == [(4.0, 4.0), (4.0, 4.0), (6.0, 6.0)]
    assert [record.queue for record in records] == [0.0, 0.0, 4.0]
    # "a" ended with the first step
    assert [w.context for w in works] == [5 + 3, 4 + 6, 5 + 7, 6 + 8, 2, 3]
    assert [w.sequences for w in works] == [w.sampled for w in works] == [2, 2, 2, 2, 1, 1]
    assert [w.tokens for w in works] == [8] * 6
    assert [w.pairs for w in works] == [15 + 6, 4 + 6, 5 + 7, 6 + 8, 3, 3]
    engine.reset()
    assert drive(engine, work, GREEDY, engine.clock, engine.sleep)[1][0].events == ()


def test_whole_batches_need_static_policy():
    with pytest.raises(
        ValueError, match=r"whole_batches with engine.policy 'fcfs'.*set engine.policy: static"
    ):
        engine_of(Simulate(chip="h200", whole_batches=True))


@pytest.mark.parametrize(
    ("options", "simulate", "message"),
    [
        ({"lookahead": 2}, {"chip": "h200"}, r"engine.lookahead is 2, .*set it to 0"),
        (
            {"mesh": {"tensor": 2}},
            {"chip": "h200"},
            r"engine.mesh is set, and .* simulate.mesh; set that one",
        ),
        (
            {"devices": [1]},
            {"chip": "h200"},
            r"engine.devices is set, .* simulate.mesh; set that one, and leave this",
        ),
        (
            {"kv_policy": "streaming"},
            {"chip": "h200", "kv_cache": False},
            "kv_policy is set and simulate.kv_cache is f",
        ),
        (
            {"kv_policy": "quest"},
            {"chip": "h200"},
            r"kv_policy is 'quest', which selects .* use a policy without",
        ),
        (
            {"preemption": "swap"},
            {"fit": "runs/x"},
            r"preemption is 'swap', .*set engine.preemption: recompute",
        ),
    ],
    ids=str,
)
def test_options_without_effect_in_simulation_are_refused(options, simulate, message):
    with pytest.raises(ValueError, match=message):
        engine_of(Simulate(**simulate), **options)


def made_of(point):
    return point.experiment.simulate, point.experiment.engine_config, point.experiment.model


@pytest.mark.slow
def test_simulated_sweep_starts_no_jax_backend(tmp_path):
    raw = {
        **RAW,
        "sweep": {"grid": {"engine.block_size": [8, 32], "simulate.chip": ["h200", "a100-40g"]}},
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert run.main([str(file), "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    summaries = store.read_runs(tmp_path / "runs/simulated")
    assert [s["device"] for s in summaries] == ["simulated h200", "simulated a100-40g"] * 2
    faster, slower = (summary["metrics"]["duration_s"] for summary in summaries[:2])
    assert faster < slower


def test_simulation_fitted_to_measured_run(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps(RAW), encoding="utf-8")
    command = [str(file), "--out", str(tmp_path / "runs"), "--quiet", "--no-report"]
    assert run.main(command) == 0
    (measured,) = (tmp_path / "runs/simulated").glob("*/0")
    (point,) = expand(
        {**RAW, "simulate": {"fit": str(measured), "model": "llama-3-8b"}}, folder=tmp_path
    )
    simulated = measure(SimulatedLLM(*made_of(point)), point, 0)
    expected = json.loads((measured / "summary.json").read_text())["metrics"]
    assert simulated.summary["duration_s"] == pytest.approx(expected["duration_s"], rel=0.02)
    assert simulated.summary["tokens_sha256"] == expected["tokens_sha256"]
    edited = (measured / "steps.jsonl").read_text().replace('"pairs":', '"pairs": 1')
    (measured / "steps.jsonl").write_text(edited)
    (changed,) = expand(
        {**RAW, "simulate": {"fit": str(measured), "model": "llama-3-8b"}}, folder=tmp_path
    )
    assert changed.key != point.key  # the key depends on the fitted steps, not on their path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"temperature": 0.0}}, "sampling.ignore_eos is false"),
        ({"simulate": {"fit": "nowhere"}}, r"simulate.fit: there is no steps.jsonl in .*nowhere"),
    ],
)
def test_wrong_simulate_section_is_reported(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        expand({**RAW, **change}, folder=tmp_path)


def test_a_request_that_could_end_early_is_refused():
    engine = engine_of(Simulate(chip="h200"))
    with pytest.raises(ValueError, match="ignore_eos: true"):
        engine.add("a", [20], SamplingParams())
    assert not engine.has_work


def test_simulated_cache_fills_memory_beside_weights():
    shape = SHAPES["opt-13b"]
    config = resolved(EngineConfig(memory_fraction=0.9, max_num_seqs=256), shape, 40e9)
    assert config.max_model_len == 2048
    assert config.num_blocks == int(0.9 * (40e9 - shape.total_bytes) / (16 * shape.token_bytes))
    assert config.token_buckets[-1] == 2048
    with pytest.raises(ValueError, match=r"weights of 25.7 GB leave 0.0 of 16.0 GB.*larger chips"):
        resolved(EngineConfig(), shape, 16e9)
    with pytest.raises(ValueError, match="made for 2048 tokens"):
        resolved(EngineConfig(max_model_len=4096), shape, 40e9)
    with pytest.raises(ValueError, match=r"set cache_tokens or engine.num_blocks"):
        resolved(EngineConfig(), shape, None)


def llm_on_mesh(model, n, chip="tpu-v5e", **engine):
    config = EngineConfig(
        memory_fraction=0.9, weight_dtype="int8", kv_cache_dtype="float8_e4m3fn", **engine
    )
    return SimulatedLLM(Simulate(chip=chip, mesh={"tensor": n}, model=model), config, "none")


def test_mesh_has_the_blocks_of_one_devices_part():
    """Llama-3-70B in 8 bits on eight TPU v5e: an eighth of the weights, and one of eight key heads,
    on each.
    """
    # Meta's number of parameters, without norms
    weights = (70_553_706_496 - 80 * 2 * 8192 - 8192) / 8
    free = CHIPS["tpu-v5e"].memory - weights
    llm = llm_on_mesh("llama-3-70b", 8, max_num_seqs=64)
    assert llm.engine.config.num_blocks == int(0.9 * free / (16 * 2 * 80 * 1 * 128))
    assert llm.tokenizer.vocab_size == 128256, "not that of a part"
    with pytest.raises(
        ValueError, match=r"weights of 17.6 GB leave 0.0 of 16.0 GB.*use more or larger chips"
    ):
        llm_on_mesh("llama-3-70b", 4)
    with pytest.raises(
        ValueError, match=r"the mesh has 64 devices, and the model 32 heads; use at most 32"
    ):
        llm_on_mesh("llama-3-8b", 64)


def test_swap_space_is_shared_by_the_devices():
    single, eight = (
        llm_on_mesh("llama-3-8b", n, "h100", preemption="swap", max_num_seqs=4) for n in (1, 8)
    )
    assert (
        single.engine.scheduler_state.config.host_blocks
        == eight.engine.scheduler_state.config.host_blocks
        > 0
    )


def speculating(k: int, acceptance: float, **options):
    """Seconds of one sequence of 2,000 tokens, and its accepted and drafted tokens; a step takes 1
    s at any size.
    """
    engine = engine_of(
        Simulate(chip="h100", acceptance=acceptance, **options),
        lambda work: 1.0,
        num_blocks=200,
        max_model_len=2304,
        speculative={"num_tokens": k, "adaptive": False},
    )
    engine.add("a", [1] * 8, SamplingParams(max_tokens=2000, ignore_eos=True))
    right = tried = 0
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, Verified):
                right = right + sum(event.accepted)
                tried = tried + sum(event.drafts)
    return engine.now, right, tried


@pytest.mark.parametrize(("k", "acceptance"), [(2, 0.6), (3, 0.7), (5, 0.8), (2, 0.9), (10, 0.9)])
def test_speculation_takes_the_steps_of_leviathans_equation_1(k: int, acceptance: float):
    """Expected tokens of a step: (1 - a^(k+1)) / (1 - a)."""
    seconds, right, tried = speculating(k, acceptance)
    assert 2000 / seconds == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance), rel=0.05)
    assert 0 < right < tried


def test_a_draft_that_is_never_or_always_right_gives_one_or_all_tokens():
    assert speculating(4, 0.0)[0] == 2000
    assert speculating(4, 1.0)[0] == pytest.approx(2000 / 5, abs=2)


def test_drafting_costs_its_seconds():
    assert speculating(4, 1.0, draft_s=0.25)[0] == pytest.approx(2000 / 5 * 2, rel=0.01)


@pytest.mark.parametrize(
    ("config", "simulate", "message"),
    [
        ({"speculative": {}}, {}, r"engine\.speculative is set and simulate\.acceptance is not"),
        ({}, {"acceptance": 0.5}, r"simulate\.acceptance is set and engine\.speculative is not"),
    ],
)
def test_speculation_and_its_acceptance_are_set_together(config, simulate, message):
    with pytest.raises(ValueError, match=message):
        engine_of(Simulate(chip="h100", **simulate), **config)


def test_given_drafts_are_offered_and_accepted_as_given():
    """Every second position has three drafts, of which two are right; the others have none."""
    sizes = {"num_blocks": 8, "max_num_batched_tokens": 16, "token_buckets": (16,)}
    config = EngineConfig(
        **sizes, max_model_len=64, speculative={"num_tokens": 4, "adaptive": False}
    )
    offers = []

    def guesses(seq, length, k):
        offers.append((seq.request_id, k))
        return Guess(0, 0) if length % 2 else Guess(3, 2)

    engine = SimulatedEngine(
        config, lambda work: 1.0, vocab_size=10, simulate=Simulate(step_s=1.0), guesses=guesses
    )
    engine.add("a", [1] * 4, SamplingParams(max_tokens=13, ignore_eos=True))
    numbers = []
    while engine.has_work:
        result = engine.step()
        events = [event for event in result.events if isinstance(event, Verified)]
        numbers += [(*event.drafts, *event.accepted) for event in events] or [None]
    # lengths before the steps: 4 (prompt), 5, 6, 9, 10, 13, 14, 17 is the end
    assert numbers == [None, None, (3, 2), None, (3, 2), None, (2, 2)]
    assert set(offers) == {("a", 4)}


def test_constant_step_has_its_time_and_needs_a_cache_size():
    options = {"num_blocks": 8, "max_model_len": 64, "max_num_batched_tokens": 16}
    simulate = Simulate(step_s=0.5, model="llama-3-8b")
    assert simulate.name == "simulated, constant step"
    engine = SimulatedLLM(simulate, EngineConfig(**options), "none").engine
    engine.add("a", [1] * 32, SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert engine.now == 0.5 * 4, "two steps of 16 prompt tokens, two more tokens"
    with pytest.raises(
        ValueError, match=r"no chip, so no memory to size the cache by; set cache_tokens"
    ):
        SimulatedLLM(simulate, EngineConfig(**options | {"num_blocks": None}), "none")
