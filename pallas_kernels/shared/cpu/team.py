"""Helpers that stay for a moment.

To wake a sleeping thread takes about as long as a product of one token. So a helper that has
finished its items waits awake for the next call of any kernel, for some microseconds, and begins
with it at once.

The team is memory of the process: PLACES words, each in a cache line of its own. A word is

    FREE        nobody waits there
    WAITING     a helper waits
    else        the address of the job that a call gave to the helper

Only a helper changes FREE to WAITING, and back when it has waited enough; only a call changes
WAITING to a job. All three compare and exchange, so a job is given to one helper or to none. A job
names its work, so that a helper from one kernel can work for another.
"""

from __future__ import annotations

from pallas_kernels.shared.cpu.memory import (
    compare_exchange,
    fetch_add,
    load_published,
    load_word,
    pause,
    publish,
    run,
    store_word,
)
from pallas_kernels.shared.cpu.translate import compiled

PLACES = 8
PLACE_BYTES = 64
FREE = 0
WAITING = 1
LOOKS = 1000  # of a waiting helper, with a pause after each: 10 to 40 microseconds
# The first words of a job
HOLDERS = 0  # the threads that use it; the last of them frees it
WORK = 8  # address of the function that a helper calls with the job; it ends with `release`
TEAM = 16  # address of the team


@compiled
def give(team, job, helpers):
    """Gives a job to at most `helpers` helpers that wait. Returns how many are still missing."""
    missing = helpers
    for place in range(PLACES):
        word = team + PLACE_BYTES * place
        if missing > 0 and load_published(word) == WAITING:
            fetch_add(job + HOLDERS, 1)
            if compare_exchange(word, WAITING, job) == WAITING:
                missing -= 1
            else:
                fetch_add(job + HOLDERS, -1)  # it is not the last one: the call holds its job
    return missing


@compiled
def _free_place(team):
    """Returns the address of a place that is this helper's now; 0 if all are taken."""
    for place in range(PLACES):
        word = team + PLACE_BYTES * place
        if load_published(word) == FREE and compare_exchange(word, FREE, WAITING) == FREE:
            return word
    return 0


@compiled
def _next_job(team):
    """Waits for a job. Returns 0 if none comes."""
    word = _free_place(team)
    if word == 0:
        return 0
    for _ in range(LOOKS):
        if load_published(word) != WAITING:
            break
        pause()
    if compare_exchange(word, WAITING, FREE) == WAITING:
        return 0
    job = load_published(word)
    publish(word, FREE)
    return job


@compiled
def serve(job):
    """What XLA's thread calls: works for a job, and for those that come soon after it."""
    team = load_word(job + TEAM)
    while job != 0:
        run(load_word(job + WORK), job)  # which may free the job
        job = _next_job(team)


@compiled
def store_header(job, team, work):
    store_word(job + TEAM, team)
    store_word(job + WORK, work)
