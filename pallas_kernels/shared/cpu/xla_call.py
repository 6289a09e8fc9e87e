"""XLA's side of a CPU kernel: the call frame, its buffers, and helpers from XLA's thread pool.

The constants are byte offsets in the structs of xla/ffi/api/c_api.h, version 0.3, on machines of 64
bits. A job is a block of memory that the threads of a call share. Its first words are those of
`team.py`; the last thread that uses it frees it.

A handler never waits for a helper that has not begun: its own thread then does all the work. So it
cannot deadlock, for any number of engines that share the pool.
"""

from __future__ import annotations

from pallas_kernels.shared.cpu.memory import (
    call,
    fetch_add,
    free,
    load_int,
    load_word,
    malloc,
    store_int,
    store_word,
)
from pallas_kernels.shared.cpu.team import HOLDERS, give, serve, store_header
from pallas_kernels.shared.cpu.translate import address_of, compiled

FFI_MAJOR = 0
FFI_MINOR = 3
FRAME_EXTENSION = 8
FRAME_API = 16
FRAME_CONTEXT = 24
FRAME_ARGUMENTS = 72
FRAME_RESULTS = 112
EXTENSION_TYPE = 8
EXTENSION_METADATA = 1  # a value: the type of the extension with the metadata
METADATA = 24  # in the extension
METADATA_MAJOR = 24
METADATA_MINOR = 28
METADATA_TRAITS = 32
METADATA_STATE = 40
BUFFER_TYPE = 16
BUFFER_DATA = 24
BUFFER_DIMS = 40
IS_FLOAT32 = 11  # a value of BUFFER_TYPE
API_ERROR_CREATE = 48
API_ERROR_DESTROY = 64
API_SCHEDULE = 136
API_NUM_THREADS = 144
INTERNAL = 13  # a value: the code of an error
ARGUMENT_BYTES = 40  # the longest of the argument structs below


@compiled
def is_query(frame):
    """Answers XLA's query for the version of its interface that this code implements.

    Returns whether the call is such a query.
    """
    extension = load_word(frame + FRAME_EXTENSION)
    if extension == 0 or load_int(extension + EXTENSION_TYPE) != EXTENSION_METADATA:
        return False
    metadata = load_word(extension + METADATA)
    store_int(metadata + METADATA_MAJOR, FFI_MAJOR)
    store_int(metadata + METADATA_MINOR, FFI_MINOR)
    store_int(metadata + METADATA_TRAITS, 0)
    store_word(metadata + METADATA_STATE, 0)
    return True


@compiled
def argument(frame, index):
    """Returns an argument's buffer."""
    return load_word(load_word(frame + FRAME_ARGUMENTS) + 8 * index)


@compiled
def result(frame, index):
    """Returns a result's buffer."""
    return load_word(load_word(frame + FRAME_RESULTS) + 8 * index)


@compiled
def data(buffer):
    """Returns the address of a buffer's numbers."""
    return load_word(buffer + BUFFER_DATA)


@compiled
def dim(buffer, axis):
    return load_word(load_word(buffer + BUFFER_DIMS) + 8 * axis)


@compiled
def dtype(buffer):
    """Returns the number of a buffer's dtype, such as IS_FLOAT32."""
    return load_int(buffer + BUFFER_TYPE)


@compiled
def threads(frame):
    """Returns the number of threads of XLA's pool; 1 if there is none."""
    api = load_word(frame + FRAME_API)
    request = malloc(ARGUMENT_BYTES)
    answer = malloc(8)
    store_word(request, 32)  # the struct's size; then: extensions, context, where the answer goes
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, answer)
    store_word(answer, 1)
    error = call(load_word(api + API_NUM_THREADS), request)
    count = 1 if error != 0 else load_word(answer)
    if error != 0:
        _destroy(api, error)
    free(request)
    free(answer)
    return count


@compiled
def failure(frame, message):
    """Returns an error for XLA, which copies the message, a C string."""
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 32)  # the struct's size; then: extensions, message, code
    store_word(request + 8, 0)
    store_word(request + 16, message)
    store_word(request + 24, INTERNAL)
    error = call(load_word(load_word(frame + FRAME_API) + API_ERROR_CREATE), request)
    free(request)
    return error


@compiled
def _destroy(api, error):
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 24)  # the struct's size; then: extensions, error
    store_word(request + 8, 0)
    store_word(request + 16, error)
    call(load_word(api + API_ERROR_DESTROY), request)
    free(request)


@compiled
def ask_for_help(frame, team, work, job, helpers, wakes):
    """Asks threads for `helpers` calls of work(job), which end with `release`.

    Helpers that are awake (`team.py`) come first. If more are missing and `wakes` is not 0, XLA's
    threads are asked. `work` is an address.
    """
    store_header(job, team, work)
    missing = give(team, job, helpers)
    if wakes == 0 or missing <= 0:
        return
    api = load_word(frame + FRAME_API)
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 40)  # the struct's size; then: extensions, context, task, its argument
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, address_of(serve))
    store_word(request + 32, job)
    for _ in range(missing):
        fetch_add(job + HOLDERS, 1)
        error = call(load_word(api + API_SCHEDULE), request)
        if error != 0:
            _destroy(api, error)
            release(job)
    free(request)


@compiled
def release(job):
    """Ends a thread's use of a job. The last user frees it."""
    if fetch_add(job + HOLDERS, -1) == 1:
        free(job)
