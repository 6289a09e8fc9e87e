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

A program calls kernels in the same order each time. So the team knows which memory the next call will
read most likely, and a helper fetches its share of it while it waits. A wrong guess costs nothing but
the reading: a fetch changes nothing, and one of an address that is not memory does not fail.
"""

from __future__ import annotations

from pallas_kernels.shared.cpu.memory import (
    compare_exchange,
    fetch_add,
    fetch_line,
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
# Behind the places: the memory that the newest call reads, and a guess of what the next one will
# read, in a line; then what has followed which memory
NEWEST = PLACES * PLACE_BYTES
NEXT = NEWEST + 8
NEXT_SHARE = NEWEST + 16
FOLLOWERS = NEWEST + PLACE_BYTES
ENTRIES = 1021  # a prime: the arrays of a model are often equal numbers of bytes apart
# Words of an entry: a memory, the one that followed it, and the bytes of a thread's share of that
FOLLOWER = 8
FOLLOWER_SHARE = 16
ENTRY_BYTES = 24
BYTES = FOLLOWERS + ENTRIES * ENTRY_BYTES  # of the team
LINE = 64  # bytes of a cache line
LINES = 8  # that are fetched between two looks: about what the memory gives meanwhile
MOST_FETCHED = 384 << 10  # bytes that a helper fetches: a part of a core's cache
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
def _entry(team, memory):
    return team + FOLLOWERS + ENTRY_BYTES * (memory // LINE % ENTRIES)


@compiled
def expect(team, memory, share):
    """Notes that a call reads `memory`, and guesses what the next one will read.

    share: bytes that a thread reads. Those of the call's own thread are the first ones, and those of
        helpers follow. 0: nobody knows which ones.

    Calls of two threads may mix their notes. Then a guess is wrong.
    """
    newest = load_word(team + NEWEST)
    entry = _entry(team, newest)
    store_word(entry, newest)
    store_word(entry + FOLLOWER, memory)
    store_word(entry + FOLLOWER_SHARE, share)
    store_word(team + NEWEST, memory)
    entry = _entry(team, memory)
    is_known = load_word(entry) == memory
    store_word(team + NEXT, load_word(entry + FOLLOWER))
    store_word(team + NEXT_SHARE, load_word(entry + FOLLOWER_SHARE) if is_known else 0)


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
    """Waits for a job, and fetches what it will read. Returns 0 if none comes."""
    word = _free_place(team)
    if word == 0:
        return 0
    share = load_word(team + NEXT_SHARE)
    line = load_word(team + NEXT) + share * (1 + (word - team) // PLACE_BYTES)
    end = line + min(share, MOST_FETCHED)
    for _ in range(LOOKS):
        if load_published(word) != WAITING:
            break
        if line < end:
            for i in range(LINES):
                fetch_line(line + LINE * i)
            line += LINE * LINES
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
