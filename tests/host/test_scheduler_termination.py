"""The end of requests, by example: stop tokens, lengths, cancelling, and the events of commit."""

from __future__ import annotations

import pytest

from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Event, Finished, Request, Sampled
from tests.host.scheduler_steps import EOS, WORD, crowded, names, request, start, step

# --- the end of a request -------------------------------------------------------------------------


def ends(
    max_tokens: int, tokens: list[int], *, min_tokens: int = 0, prompt_len: int = 3, **sizes: int
) -> Event:
    state = start(request("a", prompt_len, max_tokens, min_tokens), **sizes)
    events: tuple[Event, ...] = ()
    for token in tokens:
        assert state.running.seqs or state.waiting
        state, _, events = step(state, token)
    assert not state.running.seqs
    return events[-1]


def test_a_stop_token_ends_a_request_and_counts_as_output():
    assert ends(8, [WORD, EOS]) == Finished(1, "a", "stop", 2)


def test_max_tokens_ends_a_request():
    assert ends(2, [WORD, WORD]) == Finished(1, "a", "length", 2)


def test_a_stop_token_as_the_last_token_allowed_is_a_stop():
    assert ends(2, [WORD, EOS]) == Finished(1, "a", "stop", 2)


def test_the_model_length_cuts_max_tokens_off():
    assert ends(50, [WORD] * 3, prompt_len=7, model_len=10) == Finished(2, "a", "length", 3)


def test_max_tokens_of_one_ends_with_the_prompt():
    assert ends(1, [WORD]) == Finished(0, "a", "length", 1)


@pytest.mark.parametrize("prompt_len", [1, 3, 10])
def test_max_tokens_of_zero_ends_with_the_prompt_and_samples_nothing(prompt_len):
    state = scheduler.submit(start(model_len=10), Request("b", 2, 4))
    state = scheduler.submit(state, Request("a", prompt_len, 0, stop_token_ids=frozenset({EOS})))
    state, _, events = step(state, WORD, EOS)
    assert [event for event in events if isinstance(event, Sampled)] == [
        Sampled(0, ("b",), (WORD,))
    ]
    assert Finished(0, "a", "length", 0) in events
    assert names(scheduler.running(state)) == ["b"]
    assert state.pool.num_free == state.config.num_blocks - 1


def test_stop_tokens_before_min_tokens_are_ignored():
    assert ends(8, [EOS, EOS, EOS], min_tokens=3) == Finished(2, "a", "stop", 3)


def test_a_request_without_stop_tokens_ignores_every_token():
    state = scheduler.submit(start(), Request("a", 1, 2))
    state, *_ = step(state, EOS)
    assert step(state, EOS)[2][-1] == Finished(1, "a", "length", 2)


def test_blocks_of_a_finished_request_are_free_in_the_same_step():
    state, _, events = step(start(request("a", 9), request("b", 1)), EOS, WORD)
    assert events[-1] == Finished(0, "a", "stop", 1)
    assert state.pool.num_free == 63


# --- commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [[], [WORD], [WORD] * 3])
def test_a_wrong_number_of_sampled_tokens_is_an_error(sampled):
    state, plan = scheduler.schedule(start(request("a", 1), request("b", 1)), FCFS)
    with pytest.raises(ValueError, match=f"{len(sampled)} sampled tokens for 2 rows"):
        scheduler.commit(state, plan, sampled)


def test_commit_takes_any_sequence_of_integers():
    state, plan = scheduler.schedule(start(request("a", 1)), FCFS)
    assert scheduler.commit(state, plan, (9,)) == scheduler.commit(state, plan, [9])


# --- cancel ---------------------------------------------------------------------------------------


def test_cancelling_an_unknown_or_finished_id_changes_nothing():
    state, *_ = step(start(request("a", 1, 1)))
    for name in ("a", "nobody"):
        assert scheduler.cancel(state, name) == (state, ())


def test_cancelling_a_waiting_request_removes_it_from_the_queue():
    state, events = scheduler.cancel(start(request("a", 3), request("b", 3)), "a")
    assert events == (Finished(0, "a", "abort", 0),)
    assert names(state.waiting) == ["b"]


def test_cancelling_a_running_request_frees_its_blocks():
    state, *_ = step(start(request("a", 9), request("b", 3)))
    state, events = scheduler.cancel(state, "a")
    assert events == (Finished(1, "a", "abort", 1),)
    scheduler.check(state)
    assert state.pool.num_free == 63


def test_cancelling_in_the_middle_of_a_prompt_frees_its_blocks():
    state, *_ = step(start(request("a", 9), budget=4))
    state, events = scheduler.cancel(state, "a")
    assert (state.pool.num_free, events) == (64, (Finished(1, "a", "abort", 0),))


def test_cancelling_a_preempted_request_keeps_count_of_its_output():
    state, *_ = step(crowded())
    state, events = scheduler.cancel(state, "c")
    assert events == (Finished(2, "c", "abort", 1),)
    assert names(state.waiting) == ["b", "d"]


def test_a_stop_string_ends_a_request_with_the_reason_stop():
    state, *_ = step(start(request("a", 3)))
    assert scheduler.cancel(state, "a", "stop")[1] == (Finished(1, "a", "stop", 1),)


@pytest.mark.parametrize("cancelled", ["a", "b", "c"])
def test_a_request_cancelled_between_schedule_and_commit_is_ignored_by_commit(cancelled):
    state, plan = scheduler.schedule(start(*(request(name, 2) for name in "abc")), FCFS)
    state, _ = scheduler.cancel(state, cancelled)
    state, events = scheduler.commit(state, plan, [10, 11, 12])
    scheduler.check(state)
    remaining = [
        (name, token) for name, token in zip("abc", (10, 11, 12), strict=True) if name != cancelled
    ]
    assert Sampled(0, *(tuple(column) for column in zip(*remaining, strict=True))) in events
    assert names(state.running.seqs) == [name for name, _ in remaining]
    assert state.pool.num_free == 62


def test_a_request_cancelled_in_its_final_step_ends_once():
    state, plan = scheduler.schedule(start(request("a", 2, 1)), FCFS)
    state, first = scheduler.cancel(state, "a")
    state, second = scheduler.commit(state, plan, [EOS])
    assert [event for event in (*first, *second) if isinstance(event, Finished)] == [
        Finished(0, "a", "abort", 0)
    ]
    assert state.pool.num_free == 64


def test_an_id_submitted_again_between_schedule_and_commit_is_another_request():
    state, plan = scheduler.schedule(start(request("a", 2)), FCFS)
    state, _ = scheduler.cancel(state, "a")
    state = scheduler.submit(state, request("a", 5))
    state, events = scheduler.commit(state, plan, [EOS])
    assert not any(isinstance(event, (Sampled, Finished)) for event in events)
    assert [(seq.length, seq.arrival) for seq in state.waiting] == [(5, 1)]


def test_a_request_that_arrives_between_schedule_and_commit_waits_for_the_next_step():
    state, plan = scheduler.schedule(start(request("a", 2)), FCFS)
    state = scheduler.submit(state, request("b", 2))
    state, _ = scheduler.commit(state, plan, [WORD])
    assert step(state)[1].admitted == ("b",)


def test_cancel_finds_a_request_anywhere_in_both_queues():
    """At both ends and in the middle of both queues; the others keep their order."""
    config = scheduler.SchedulerConfig(2, 40, 16, 4, 12)
    for name in ("0", "2", "3", "4", "5", "9"):
        state = scheduler.init(config)
        for i in range(10):
            state = scheduler.submit(state, Request(f"{i}", 3, 4))
        state, plan = scheduler.schedule(state, FCFS)
        assert plan.admitted == ("0", "1", "2", "3")
        state, (event,) = scheduler.cancel(state, name)
        assert (event.request_id, event.num_output) == (name, 0)
        remaining = [seq.request_id for seq in (*state.running.seqs, *state.waiting)]
        assert remaining == [f"{i}" for i in range(10) if f"{i}" != name]
        assert len(set(map(len, state.running))) == 1
        scheduler.check(state)
