"""XLA's side of a CPU kernel: the call frame, its buffers, and helpers from XLA's thread pool.

xla/ffi/api/c_api.h, version 0.3: byte offsets in its structs on machines of 64 bits. A job is a block of memory that
the threads of a call share. Its first word counts those who use it, and the last one frees it.

A handler never waits for a helper that has not begun: its own thread then does all the work. So it cannot deadlock, for
any number of engines that share the pool.
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
from pallas_kernels.shared.cpu.translate import compiled

FFI_MAJOR, FFI_MINOR = 0, 3
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGUMENTS, FRAME_RESULTS = 8, 16, 24, 72, 112
EXTENSION_TYPE, EXTENSION_METADATA, METADATA = (
    8,
    1,
    24,
)  # the type's offset, its value for metadata, and theirs
METADATA_MAJOR, METADATA_MINOR, METADATA_TRAITS, METADATA_STATE = 24, 28, 32, 40
BUFFER_TYPE, BUFFER_RANK, BUFFER_DATA, BUFFER_DIMS = 16, 32, 24, 40
IS_FLOAT32 = 11
API_ERROR_CREATE, API_ERROR_DESTROY, API_SCHEDULE, API_NUM_THREADS = 48, 64, 136, 144
INTERNAL = 13  # a code of an error
ARGUMENT_BYTES = 40  # the longest of the argument structs below
HOLDERS = 0  # the word of a job that counts its users


@compiled
def is_query(frame):
    """Answers XLA's query for the version of its interface that this code implements; else returns false."""
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
    request, answer = malloc(ARGUMENT_BYTES), malloc(8)
    store_word(request, 32)  # the struct's size; then: extensions, context, where the answer goes
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, answer)
    store_word(answer, 1)
    error = call(load_word(api + API_NUM_THREADS), request)
    found = 1 if error != 0 else load_word(answer)
    if error != 0:
        _destroy(api, error)
    free(request)
    free(answer)
    return found


@compiled
def failure(frame, message):
    """Returns an error for XLA, which copies the message, a C string."""
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 32)  # the struct's size; then: extensions, message, code
    store_word(request + 8, 0)
    store_word(request + 16, message)
    store_word(request + 24, INTERNAL)
    made = call(load_word(load_word(frame + FRAME_API) + API_ERROR_CREATE), request)
    free(request)
    return made


@compiled
def _destroy(api, error):
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 24)
    store_word(request + 8, 0)
    store_word(request + 16, error)
    call(load_word(api + API_ERROR_DESTROY), request)
    free(request)


@compiled
def ask_for_help(frame, work, job, helpers):
    """Asks for so many calls of work(job), which end with `release`. `work` is an address."""
    api = load_word(frame + FRAME_API)
    request = malloc(ARGUMENT_BYTES)
    store_word(request, 40)  # the struct's size; then: extensions, context, task, its argument
    store_word(request + 8, 0)
    store_word(request + 16, load_word(frame + FRAME_CONTEXT))
    store_word(request + 24, work)
    store_word(request + 32, job)
    for _ in range(helpers):
        fetch_add(job + HOLDERS, 1)
        error = call(load_word(api + API_SCHEDULE), request)
        if error != 0:
            _destroy(api, error)
            release(job)
    free(request)


@compiled
def release(job):
    if fetch_add(job + HOLDERS, -1) == 1:
        free(job)
