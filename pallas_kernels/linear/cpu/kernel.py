"""Products of activations with packed weights: compiled code behind XLA's FFI.

    handle        XLA calls it with a call frame. It cuts the rows of x into tiles of at most
                  COLUMNS rows, asks XLA's thread pool for helpers, and runs items. At the end it
                  waits for the items that helpers have begun.
    _run_items    first packs tiles of x, one tile an item: it normalises the rows, and stores them
                  input by input. When all tiles are packed, it multiplies. An item is now some
                  panels of the weight by some tiles.

A helper that begins too late finds no item, and ends. Shapes are read from the call frame, so one
program serves all shapes. A variant has code for its own dtypes alone; only a variant with products
of low rank has code for these (`job.py`).
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.linear.cpu import low_rank, rounded
from pallas_kernels.linear.cpu.job import (
    ACTIVATION,
    BEGUN,
    BIAS,
    CHUNK_FIRST_TILE,
    CHUNK_TABLE,
    CHUNK_TILE_COUNT,
    CHUNK_WORDS,
    CHUNKS,
    COMPUTED_PANELS,
    COUNTER_BYTES,
    COUNTERS,
    END,
    EPS,
    FIRST,
    FIRST_PANEL,
    GROUP,
    ITEMS,
    ITEMS_DONE,
    JOB_BYTES,
    LOW,
    LOW_A,
    NEXT_TILE,
    NORM,
    NORM_WEIGHT,
    ORDER,
    OUT,
    OUT_SIZE,
    OUTPUTS,
    PACKED,
    PANEL_BYTES,
    PANELS,
    RESIDUAL,
    RMS_PLUS_ONE,
    ROUNDED_WORDS,
    SCALES,
    SEGMENTS,
    STEP_BYTES,
    STEP_INPUTS,
    STEPS,
    TABLE,
    TILE_BYTES,
    TILE_MATRIX,
    TILE_PLACE,
    TILE_ROWS,
    TILE_WORDS,
    TILES,
    TILES_DONE,
    WEIGHT,
    WEIGHT_SIZE,
    WIDENS,
    WIDTH,
    WORDS,
    X_SIZE,
    K,
    X,
    bytes_of_row,
    half_outputs,
    rounded_up,
    token_at,
)
from pallas_kernels.linear.cpu.vectors import (
    BFLOAT16,
    COLUMNS,
    FLOAT32,
    PAIRS,
    PANEL,
    add_16,
    clear,
    gate,
    multiply,
    narrow,
    prefetch,
    prefetch_written,
    scale_and_add,
    scale_by,
    square_root,
    sum_of_squares,
    transpose,
    widen,
    widen_blocks,
    write_16,
    write_columns,
)
from pallas_kernels.shared.cpu.memory import (
    copy_bytes,
    fetch_add,
    free,
    load_float,
    load_int,
    load_published,
    load_word,
    malloc,
    store_byte,
    store_float,
    store_word,
    wait_for,
)
from pallas_kernels.shared.cpu.team import HOLDERS
from pallas_kernels.shared.cpu.translate import address_of, compiled, compiled_apart
from pallas_kernels.shared.cpu.vectors import FULL
from pallas_kernels.shared.cpu.xla_call import (
    IS_FLOAT32,
    argument,
    ask_for_help,
    data,
    dim,
    dtype,
    release,
    result,
    threads,
)

# Most inputs (or pairs of them) of a tile that are computed while its sums stay in registers
MAX_DEPTH = 2048
GROUP_BYTES = 400 << 10  # most bytes of the panels of an item, so that they stay in a core's cache
GROUP_PANELS = 16  # most panels of an item
CHUNK_TILES = 16  # most tiles of an item whose sums wait in memory, because its steps are cut
# Fewest tiles of an item for which panels of blocks are widened before they are multiplied
WIDENED_TILES = 3
MAX_SEGMENTS = 16  # more threads share segments
# Sleeping threads are woken for a product that reads at least so many bytes: those of its panels,
# once for each tile. To read them takes as long as to wake a thread.
WAKING_BYTES = 96 << 10
# A product of one tile reads each weight once, so there is no time to fetch the next panels. It
# fetches floats so many bytes ahead. Of blocks it fetches what it reads, which costs nothing: the
# CPU's own prefetcher follows them faster alone (measured on Zen 4).
AHEAD = 4096
MIN_TILES = 8  # fewest tiles of an item, in a call that has at least twice as many
SUMS = 4 * PANEL * COLUMNS  # bytes of a tile's sums
SCALES_BYTES = 4 * 4 * PANEL  # bytes of a panel's scales and biases, and of scratch

# The call's operands, by number (`implementation.py`); those of low rank follow
X_OPERAND = 0
WEIGHT_OPERAND = 1
SCALES_OPERAND = 2
BIAS_OPERAND = 3
NORM_WEIGHT_OPERAND = 4
RESIDUAL_OPERAND = 5
SIZES_OPERAND = 6
OPTIONS_OPERAND = 7
EPS_OPERAND = 8
# Byte offsets in the options
OPTION_OUTPUTS = 0
OPTION_FIRST = 4
OPTION_END = 8
OPTION_ACTIVATION = 12
OPTION_NORM = 16


# --- packing --------------------------------------------------------------------------------------


@compiled
def _load_floats(source, k, out):
    """Writes K numbers of x's dtype to `out` as float32, and zeros to whole vectors. Two vectors
    behind them are scratch memory.
    """
    in_vectors = k - k % FULL
    widen(X_SIZE, source, out, in_vectors)
    if in_vectors < k:
        end = out + 4 * in_vectors
        # The last numbers do not fill a vector. They are copied behind the row as they are stored,
        # with zeros after them, and widened from there to their place.
        tail = end + 4 * FULL
        for i in range(FULL):
            store_float(tail + 4 * i, np.float32(0))
        copy_bytes(source + X_SIZE * in_vectors, tail, X_SIZE * (k - in_vectors))
        widen(X_SIZE, tail, end, FULL)


@compiled
def _load_row(job, row, norm, out):
    """Writes one row of x to `out`: normalised, in the dtype of the factors.

    It is padded with zeros to whole vectors.
    """
    k = load_word(job + K)
    _load_floats(load_word(job + X) + row * k * X_SIZE, k, out)
    padded = rounded_up(k, FULL)
    if load_word(job + NORM) != 0:
        mean = sum_of_squares(out, padded) / np.float32(k)
        factor = np.float32(1) / square_root(mean + load_float(job + EPS))
        scale_by(out, factor, norm, padded)
    if X_SIZE == BFLOAT16:  # dtypes are named by the bytes of a number
        # x is rounded to its own dtype; the numbers stay bfloat16 only for an instruction that
        # multiplies pairs of them
        narrow(out, out, padded)
        if not (PAIRS and WEIGHT_SIZE == BFLOAT16):
            for start in range(padded - FULL, -1, -FULL):  # from the end, because it is in place
                widen(BFLOAT16, out + 2 * start, out + 4 * start, FULL)


@compiled
def _load_norm_weights(job, out):
    """Writes the weights of the norm to `out` as float32: K numbers, and zeros to whole vectors."""
    k = load_word(job + K)
    norm_kind = load_word(job + NORM)
    if norm_kind == 0:
        return
    _load_floats(load_word(job + NORM_WEIGHT), k, out)
    if norm_kind == RMS_PLUS_ONE:
        for i in range(k):
            store_float(out + 4 * i, np.float32(1) + load_float(out + 4 * i))


@compiled
def _pack_tile(job, tile, norm, rows):
    """Packs one tile of x. rows: scratch of 16 rows."""
    entry = load_word(job + TABLE) + 8 * TILE_WORDS * tile
    first = load_word(entry + TILE_PLACE)
    columns = load_word(entry + TILE_ROWS)
    words = load_word(job + STEPS) * load_word(job + WORDS)
    row_bytes = bytes_of_row(load_word(job + K))
    out = load_word(job + PACKED) + tile * load_word(job + TILE_BYTES)
    for i in range(columns):
        _load_row(job, token_at(job, first + i), norm, rows + i * row_bytes)
    if LOW and load_word(job + LOW_A) != 0:
        low_rank.multiply_rows(job, first, columns, rows)
    if ROUNDED_WORDS > 0:
        for i in range(columns):
            rounded.round_row(WEIGHT_SIZE, rows + i * row_bytes, load_word(job + K))
    if columns == 1:
        widen(FLOAT32, rows, out, rounded_up(words, FULL))
        return
    for word in range(0, words, FULL):
        transpose(rows + 4 * word, row_bytes, out + 4 * columns * word, columns)


# --- the product ----------------------------------------------------------------------------------


@compiled_apart
def _multiply_tile(columns, w, x, count, sums, next_weight, stride):
    if ROUNDED_WORDS > 0:
        rounded.multiply_rounded(WEIGHT_SIZE, columns, w, x, count, sums, next_weight, stride)
    else:
        multiply(WEIGHT_SIZE, columns, w, x, count, sums, next_weight, stride)


@compiled_apart
def _multiply_widened_tile(columns, w, x, count, sums, next_weight, stride):
    multiply(FLOAT32, columns, w, x, count, sums, next_weight, stride)


@compiled_apart
def _widen_panel(w, count, out):
    widen_blocks(WEIGHT_SIZE, w, count, out)


@compiled
def _multiply_panel(columns, w, widened, x, count, sums, next_weight, stride):
    """Adds the products of `count` steps of a panel to a tile's sums.

    widened: address of the same weights as float32, or 0.
    """
    if WIDENS:
        if widened != 0:
            inputs = count * STEP_INPUTS
            input_stride = -(-stride // STEP_INPUTS)
            _multiply_widened_tile(columns, widened, x, inputs, sums, next_weight, input_stride)
        else:
            _multiply_tile(columns, w, x, count, sums, next_weight, stride)
    else:
        _multiply_tile(columns, w, x, count, sums, next_weight, stride)


@compiled
def _load_vector(address, size, first, end, out):
    """Writes numbers first : end of a vector to `out` [16] as float32, and zeros after them.

    The 16 numbers behind `out` are scratch memory.
    """
    for i in range(FULL):
        store_float(out + 4 * i, np.float32(0))
    numbers = out + 4 * FULL
    for i in range(FULL):
        store_float(numbers + 4 * i, np.float32(0))
    if end > first:
        copy_bytes(address + size * first, numbers, size * (end - first))
    widen(size, numbers, out, FULL)


@compiled
def _load_scales_and_biases(job, panel, matrix, out):
    """Writes a panel's scales and biases to `out` [2, 32] float32.

    Behind them is scratch memory of 32 numbers.
    """
    gated = load_word(job + ACTIVATION) != 0
    outputs = load_word(job + OUTPUTS)
    for half in range(2):
        first, end = half_outputs(job, panel, half)
        matrix_start = (outputs // 2 if gated and half == 1 else 0) + outputs * matrix
        scales = load_word(job + SCALES)
        bias = load_word(job + BIAS)
        if scales == 0:
            for i in range(FULL):
                store_float(out + 4 * (FULL * half + i), np.float32(1))
        else:
            _load_vector(scales, 4, matrix_start + first, matrix_start + end, out + 4 * (2 * PANEL))
            copy_bytes(out + 4 * (2 * PANEL), out + 4 * FULL * half, 4 * FULL)
        if bias == 0:
            for i in range(FULL):
                store_float(out + 4 * (PANEL + FULL * half + i), np.float32(0))
        else:
            _load_vector(
                bias, X_SIZE, matrix_start + first, matrix_start + end, out + 4 * (2 * PANEL)
            )
            copy_bytes(out + 4 * (2 * PANEL), out + 4 * (PANEL + FULL * half), 4 * FULL)


@compiled
def _finish_tile(job, panel, entry, sums, scales_and_biases):
    """Applies scales, biases, activation and residual to a tile's sums, and writes the result."""
    row = load_word(entry + TILE_PLACE)
    columns = load_word(entry + TILE_ROWS)
    size = load_word(job + OUT_SIZE)
    width = load_word(job + WIDTH)
    activation = load_word(job + ACTIVATION)
    residual = load_word(job + RESIDUAL)
    if load_word(job + SCALES) != 0 or load_word(job + BIAS) != 0:
        scale_and_add(sums, scales_and_biases, scales_and_biases + 4 * PANEL, columns)
    if LOW and load_word(job + LOW_A) != 0:
        low_rank.add_sums(job, panel, entry, sums)
    if activation != 0:
        gate(activation, sums, columns)
    scratch = scales_and_biases + 4 * 2 * PANEL
    for half in range(2 if activation == 0 else 1):
        first, end = half_outputs(job, panel, half)
        count = end - first
        column = first - load_word(job + FIRST)
        if count <= 0:
            continue
        if count == FULL and residual == 0 and load_word(job + ORDER) == 0:
            out = load_word(job + OUT) + size * (row * width + column)
            write_columns(size, sums + 4 * FULL * half, out, size * width, columns)
            continue
        for i in range(columns):
            tile_row = sums + 4 * (PANEL * i + FULL * half)
            position = token_at(job, row + i) * width + column
            if count == FULL:
                if residual != 0:
                    add_16(X_SIZE, tile_row, residual + X_SIZE * position)
                write_16(size, tile_row, load_word(job + OUT) + size * position)
            else:
                if residual != 0:
                    copy_bytes(residual + X_SIZE * position, scratch, X_SIZE * count)
                    add_16(X_SIZE, tile_row, scratch)
                write_16(size, tile_row, scratch)
                copy_bytes(scratch, load_word(job + OUT) + size * position, size * count)


@compiled
def _prefetch_results(job, panel, entry):
    """Fetches the lines of the result, and of the residual, into which a tile's sums go."""
    if LOW and load_word(job + LOW_A) != 0:
        low_rank.prefetch_factors(job, panel, entry)
    size = load_word(job + OUT_SIZE)
    width = load_word(job + WIDTH)
    residual = load_word(job + RESIDUAL)
    row = load_word(entry + TILE_PLACE)
    columns = load_word(entry + TILE_ROWS)
    first, _ = half_outputs(job, panel, 0)
    column = first - load_word(job + FIRST)
    for i in range(columns):
        position = token_at(job, row + i) * width + column
        prefetch_written(load_word(job + OUT) + size * position)
        prefetch_written(load_word(job + OUT) + size * (position + FULL))
        if residual != 0:
            prefetch(residual + X_SIZE * position)
            prefetch(residual + X_SIZE * (position + FULL))


@compiled
def _depth(steps):
    """Returns the steps of a tile that are computed while its sums stay in registers.

    They are equal parts of all steps; the last part may be smaller.
    """
    parts = -(-steps * STEP_INPUTS // MAX_DEPTH)
    return -(-steps // parts)


@compiled
def _weight_of(job, item):
    """Returns the address of the first panel of an item."""
    chunks = load_word(job + CHUNKS)
    tile_table = load_word(job + TABLE)
    chunk = load_word(job + CHUNK_TABLE) + 8 * CHUNK_WORDS * (item % chunks)
    first_tile = load_word(chunk + CHUNK_FIRST_TILE)
    matrix = load_word(tile_table + 8 * TILE_WORDS * first_tile + TILE_MATRIX)
    panel = (
        matrix * load_word(job + PANELS)
        + load_word(job + FIRST_PANEL)
        + load_word(job + GROUP) * (item // chunks)
    )
    return load_word(job + WEIGHT) + panel * load_word(job + PANEL_BYTES)


@compiled
def _compute_item(job, item, sums):
    """Computes a group of panels by a chunk of tiles.

    One tile after the other is multiplied with all panels of the group, which stay in a core's
    cache. So neighbouring numbers of the result are written soon after one another.
    """
    chunks = load_word(job + CHUNKS)
    group = load_word(job + GROUP)
    chunk = load_word(job + CHUNK_TABLE) + 8 * CHUNK_WORDS * (item % chunks)
    first_tile = load_word(chunk + CHUNK_FIRST_TILE)
    tiles = load_word(chunk + CHUNK_TILE_COUNT)
    first = load_word(job + FIRST_PANEL) + group * (item // chunks)
    end = min(first + group, load_word(job + FIRST_PANEL) + load_word(job + COMPUTED_PANELS))
    table = load_word(job + TABLE)
    packed = load_word(job + PACKED)
    tile_bytes = load_word(job + TILE_BYTES)
    panel_bytes = load_word(job + PANEL_BYTES)
    steps = load_word(job + STEPS)
    words = load_word(job + WORDS)
    step_bytes = STEP_BYTES
    matrix = load_word(table + 8 * TILE_WORDS * first_tile + TILE_MATRIX)
    weight = _weight_of(job, item)
    # While a tile is multiplied, a part of the next item's panels is fetched. The next item is a
    # guess: the neighbour, which this thread takes unless another one helps with its segment. The
    # last group may have fewer panels: addresses behind the weight are not read, and a fetch of
    # them does not fail.
    next_weight = _weight_of(job, min(item + 1, load_word(job + ITEMS) - 1))
    share = -(-panel_bytes // tiles)
    stride = -(-step_bytes // tiles)
    depth = _depth(steps)
    # Bytes between the sums of two tiles. 0: a tile's sums are finished before the next tile's.
    sums_stride = SUMS if depth < steps else 0
    scales = sums + SUMS * (CHUNK_TILES * GROUP_PANELS if sums_stride > 0 else 1)
    if load_word(job + SCALES) != 0 or load_word(job + BIAS) != 0:
        for panel in range(first, end):
            _load_scales_and_biases(job, panel, matrix, scales + SCALES_BYTES * (panel - first))
    widened = 0
    float_step_bytes = 4 * PANEL * STEP_INPUTS
    float_panel_bytes = steps * float_step_bytes
    if WIDENS and tiles >= WIDENED_TILES:
        widened = scales + SCALES_BYTES * GROUP_PANELS
        for panel in range(first, end):
            panel_weight = weight + (panel - first) * panel_bytes
            _widen_panel(panel_weight, steps, widened + (panel - first) * float_panel_bytes)
    for start in range(0, steps, depth):
        count = min(depth, steps - start)
        next_start = step_bytes * start // tiles
        for tile in range(first_tile, first_tile + tiles):
            entry = table + 8 * TILE_WORDS * tile
            columns = load_word(entry + TILE_ROWS)
            x = packed + tile * tile_bytes + 4 * columns * words * start
            fetched = next_weight + (tile - first_tile) * share + next_start
            for panel in range(first, end):
                tile_sums = sums + sums_stride * ((tile - first_tile) * group + panel - first)
                w = weight + (panel - first) * panel_bytes + step_bytes * start
                fetched_panel = fetched + (panel - first) * panel_bytes
                if tiles == 1:
                    fetched_panel = w + (AHEAD if STEP_INPUTS == 1 else 0)
                if start == 0:
                    clear(tile_sums, columns)
                if start + count == steps:
                    _prefetch_results(job, panel, entry)
                floats = 0
                if widened != 0:
                    floats = (
                        widened + (panel - first) * float_panel_bytes + float_step_bytes * start
                    )
                _multiply_panel(columns, w, floats, x, count, tile_sums, fetched_panel, stride)
                if start + count == steps:
                    panel_scales = scales + SCALES_BYTES * (panel - first)
                    _finish_tile(job, panel, entry, tile_sums, panel_scales)


@compiled
def _scratch_bytes(job):
    """Returns the bytes of scratch memory of a thread.

    First it holds rows of x and weights of the norm, then sums of an item, and panels that are
    widened. It has 128 bytes more, because its beginning is moved to a multiple of 64 bytes.
    """
    k = load_word(job + K)
    steps = load_word(job + STEPS)
    sums = SUMS * (1 if steps * STEP_INPUTS <= MAX_DEPTH else CHUNK_TILES * GROUP_PANELS)
    item = sums + SCALES_BYTES * GROUP_PANELS
    if WIDENS and load_word(job + TILES) >= WIDENED_TILES:
        item += load_word(job + GROUP) * steps * STEP_INPUTS * 4 * PANEL
    return max((FULL + 1) * bytes_of_row(k), item) + 128


@compiled_apart
def _run_segment(job, segment, scratch):
    """Computes items of a segment until none is left."""
    items = load_word(job + ITEMS)
    segments = load_word(job + SEGMENTS)
    first = segment * items // segments
    size = (segment + 1) * items // segments - first
    counter = load_word(job + COUNTERS) + COUNTER_BYTES * segment
    computed = 0
    while load_published(counter) < size:
        place = fetch_add(counter, 1)
        if place >= size:
            break
        _compute_item(job, first + place, scratch)
        computed += 1
    if computed > 0:
        fetch_add(job + ITEMS_DONE, computed)


@compiled_apart
def _run_items(job):
    """Packs tiles until none is left, waits for those of other threads, and computes items."""
    allocated = malloc(_scratch_bytes(job))
    scratch = rounded_up(allocated, 64)
    tiles = load_word(job + TILES)
    norm = scratch + FULL * bytes_of_row(load_word(job + K))
    has_norm_weights = False
    while True:
        tile = fetch_add(job + NEXT_TILE, 1)
        if tile >= tiles:
            break
        if not has_norm_weights:
            _load_norm_weights(job, norm)
            has_norm_weights = True
        _pack_tile(job, tile, norm, scratch)
        fetch_add(job + TILES_DONE, 1)
    wait_for(job + TILES_DONE, tiles)
    segments = load_word(job + SEGMENTS)
    first = fetch_add(job + BEGUN, 1)
    for step in range(segments):
        _run_segment(job, (first + step) % segments, scratch)
    free(allocated)


@compiled
def _help(job):
    """Runs items in a helper's thread, if it has not begun too late."""
    if fetch_add(job + ITEMS_DONE, 0) < load_word(job + ITEMS):
        _run_items(job)
    release(job)


# --- the handler ----------------------------------------------------------------------------------


@compiled
def _number_bytes(buffer):
    """Returns the bytes of a float32 or bfloat16 number."""
    return 4 if dtype(buffer) == IS_FLOAT32 else 2


@compiled
def _optional(buffer):
    """Returns the address of an operand; 0 if it has no numbers."""
    return 0 if dim(buffer, 0) == 0 else data(buffer)


@compiled
def _tile_count(rows):
    return -(-rows // COLUMNS)


@compiled
def _split(tiles, computed_panels, panel_bytes, inputs, matrices, workers):
    """Returns (how many chunks the tiles of a matrix are cut into at most, panels of a group).

    inputs: of a panel, or pairs of inputs.

    An item is a chunk of tiles by a group of panels. Each worker gets at least 4 items if there are
    so many, so that workers end at about the same time. Otherwise there are few chunks, because the
    whole weight is read for each chunk.
    """
    group = min(GROUP_PANELS, max(1, GROUP_BYTES // min(panel_bytes, MAX_DEPTH * 4 * PANEL)))
    min_items = 4 * workers
    chunks = max(1, min(tiles, -(-min_items // computed_panels))) if workers > 1 else 1
    if tiles >= 2 * MIN_TILES and matrices == 1 and inputs <= MAX_DEPTH:
        # A core's cache has no room for the tiles, so all panels of a group use a tile before the
        # next tile is read. There are enough chunks for 16 items of the largest groups for each
        # worker, but no chunk has fewer than MIN_TILES tiles. Groups are smaller if a worker would
        # get fewer than 4 items.
        long_chunks = max(1, min(tiles // MIN_TILES, -(-4 * min_items * group // computed_panels)))
        if long_chunks * computed_panels >= min_items:
            group = max(1, min(group, long_chunks * computed_panels // min_items))
            groups = -(-computed_panels // group)
            return long_chunks, -(-computed_panels // groups)  # equal groups
    elif inputs > MAX_DEPTH:
        chunks = max(chunks, -(-tiles // CHUNK_TILES))
    # at least 64 groups a worker, as long as a group has one panel or more
    return chunks, max(1, min(group, computed_panels // (64 * workers)))


@compiled
def _matrix_rows(frame, matrix):
    """Returns how many rows of x a matrix multiplies: all of them if the call has no sizes."""
    sizes = argument(frame, SIZES_OPERAND)
    if dim(sizes, 0) == 0:
        return dim(argument(frame, X_OPERAND), 0)
    return load_int(data(sizes) + 4 * matrix)


@compiled
def _all_tiles(frame, matrices):
    tiles = 0
    for matrix in range(matrices):
        tiles += _tile_count(_matrix_rows(frame, matrix))
    return tiles


@compiled
def _list_tiles(frame, job, matrices, chunk_tiles):
    """Writes the tables of the tiles of all matrices, and of their chunks.

    chunk_tiles: most tiles of a chunk. Returns (number of chunks, number of rows of all tiles).
    """
    place = 0
    tile = 0
    chunks = 0
    for matrix in range(matrices):
        rows = _matrix_rows(frame, matrix)
        tiles = _tile_count(rows)
        matrix_chunks = -(-tiles // chunk_tiles)
        for i in range(matrix_chunks):
            begin = i * tiles // matrix_chunks
            end = (i + 1) * tiles // matrix_chunks
            chunk = load_word(job + CHUNK_TABLE) + 8 * CHUNK_WORDS * chunks
            store_word(chunk + CHUNK_FIRST_TILE, tile + begin)
            store_word(chunk + CHUNK_TILE_COUNT, end - begin)
            chunks += 1
        for i in range(tiles):
            columns = rows // tiles + (1 if i < rows % tiles else 0)
            entry = load_word(job + TABLE) + 8 * TILE_WORDS * tile
            store_word(entry + TILE_PLACE, place)
            store_word(entry + TILE_ROWS, columns)
            store_word(entry + TILE_MATRIX, matrix)
            place += columns
            tile += 1
    return chunks, place


@compiled
def _store_operands(frame, job):
    """Writes what the job needs of the call's operands, but for the weight's panels."""
    x = argument(frame, X_OPERAND)
    options = data(argument(frame, OPTIONS_OPERAND))
    out = result(frame, 0)
    store_word(job + X, data(x))
    store_word(job + K, dim(x, 1))
    store_word(job + NORM, load_int(options + OPTION_NORM))
    store_word(job + NORM_WEIGHT, data(argument(frame, NORM_WEIGHT_OPERAND)))
    store_float(job + EPS, load_float(data(argument(frame, EPS_OPERAND))))
    store_word(job + FIRST, load_int(options + OPTION_FIRST))
    store_word(job + END, load_int(options + OPTION_END))
    store_word(job + SCALES, _optional(argument(frame, SCALES_OPERAND)))
    store_word(job + BIAS, _optional(argument(frame, BIAS_OPERAND)))
    store_word(job + ACTIVATION, load_int(options + OPTION_ACTIVATION))
    store_word(job + RESIDUAL, _optional(argument(frame, RESIDUAL_OPERAND)))
    store_word(job + OUTPUTS, load_int(options + OPTION_OUTPUTS))
    store_word(job + OUT, data(out))
    store_word(job + OUT_SIZE, _number_bytes(out))
    store_word(job + WIDTH, dim(out, 1))
    store_word(job + PACKED, data(result(frame, 1)))
    store_word(job + TILE_BYTES, 4 * (COLUMNS * rounded_up(dim(x, 1), FULL) + 2 * FULL))
    words = STEP_INPUTS if PAIRS or WEIGHT_SIZE != BFLOAT16 else 2
    store_word(job + WORDS, ROUNDED_WORDS if ROUNDED_WORDS > 0 else words)


@compiled
def _make_job(frame, workers):
    """Lists the work of a call. Operands: see `implementation.py`."""
    weight = argument(frame, WEIGHT_OPERAND)
    options = data(argument(frame, OPTIONS_OPERAND))
    matrices = max(dim(argument(frame, SIZES_OPERAND), 0), 1)
    steps = dim(weight, 1)
    panels = dim(weight, 0) // matrices
    tiles = _all_tiles(frame, matrices)
    gated = load_int(options + OPTION_ACTIVATION) != 0
    first_panel = 0 if gated else load_int(options + OPTION_FIRST) // PANEL
    end_panel = panels if gated else -(-load_int(options + OPTION_END) // PANEL)
    computed_panels = end_panel - first_panel
    panel_bytes = steps * STEP_BYTES
    inputs = steps * STEP_INPUTS
    cached_bytes = panel_bytes  # of a panel that many tiles use
    if WIDENS:
        cached_bytes = inputs * 4 * PANEL
    max_chunks, group = _split(tiles, computed_panels, cached_bytes, inputs, matrices, workers)
    chunks_at = JOB_BYTES + 8 * TILE_WORDS * tiles
    low_at = rounded_up(chunks_at + 8 * CHUNK_WORDS * tiles, 64)
    low_bytes = low_rank.room(frame, dim(argument(frame, X_OPERAND), 0)) if LOW else 0
    counters_at = rounded_up(low_at + low_bytes, COUNTER_BYTES)
    segments = min(workers, MAX_SEGMENTS)
    job = malloc(counters_at + COUNTER_BYTES * segments)
    store_word(job + SEGMENTS, segments)
    store_word(job + COUNTERS, job + counters_at)
    for segment in range(segments):
        store_word(job + counters_at + COUNTER_BYTES * segment, 0)
    store_word(job + TABLE, job + JOB_BYTES)
    store_word(job + CHUNK_TABLE, job + chunks_at)
    chunks, rows = _list_tiles(frame, job, matrices, max(1, -(-tiles // max_chunks)))
    store_word(job + HOLDERS, 1)
    for counter in (NEXT_TILE, TILES_DONE, BEGUN, ITEMS_DONE):
        store_word(job + counter, 0)
    store_word(job + TILES, tiles)
    store_word(job + ITEMS, chunks * (-(-computed_panels // group)))
    store_word(job + WEIGHT, data(weight))
    store_word(job + PANELS, panels)
    store_word(job + PANEL_BYTES, panel_bytes)
    store_word(job + STEPS, steps)
    store_word(job + CHUNKS, chunks)
    store_word(job + FIRST_PANEL, first_panel)
    store_word(job + COMPUTED_PANELS, computed_panels)
    store_word(job + GROUP, group)
    _store_operands(frame, job)
    if LOW:
        low_rank.begin(job, frame, rows, job + low_at)
    return job


@compiled
def _clear_padding(frame):
    """Sets the results of the last tokens to zero, which are multiplied with no matrix.

    XLA does not clear the result's memory.
    """
    sizes = argument(frame, SIZES_OPERAND)
    if dim(sizes, 0) == 0:
        return
    out = result(frame, 0)
    used = 0
    for matrix in range(dim(sizes, 0)):
        used += load_int(data(sizes) + 4 * matrix)
    row_bytes = _number_bytes(out) * dim(out, 1)
    for byte in range(row_bytes * used, row_bytes * dim(out, 0)):
        store_byte(data(out) + byte, 0)


@compiled
def handle(frame, team):
    """What XLA calls, with a call frame and the helpers' places. Returns 0: no error."""
    workers = threads(frame)
    job = _make_job(frame, workers)
    items = load_word(job + ITEMS)
    tiles = load_word(job + TILES)
    wakes = load_word(job + COMPUTED_PANELS) * load_word(job + PANEL_BYTES) * tiles >= WAKING_BYTES
    ask_for_help(frame, team, address_of(_help), job, min(workers, items) - 1, wakes)
    _clear_padding(frame)
    _run_items(job)
    wait_for(job + ITEMS_DONE, items)
    release(job)
    return 0
