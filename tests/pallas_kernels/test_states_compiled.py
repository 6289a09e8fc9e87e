"""A layer with states, compiled for a TPU that is not here: the kernels change pages in place,
where plain XLA copies whole page arrays into another layout. It needs libtpu.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import aot_tpu

ROOT = Path(__file__).parents[2]
# prints, for each number of tokens, copies of whole arrays and the megabytes of the program beside
# its arguments
PROGRAM = """
import json
from types import SimpleNamespace
import jax
import jax.numpy as jnp
from flax import nnx
from pallas_kernels import aot_tpu
aot_tpu.prepare()
from experiments.hardware import hlo
from experiments.hardware.compiled import whole_arrays
from pagedjax.device import attention
from pagedjax.device.batch import Batch
from pagedjax.device.cache import BlockSizes, Pages
from pagedjax.device.extras import LayerTables
from pagedjax.device.models.mixers.gated_delta import GatedDelta

ROWS, WIDTH, PAGES, HIDDEN = 64, 64, 8193, 1024
mixer = GatedDelta(length=4, heads=16, key_heads=16, key_dim=128, value_dim=128)  # of Qwen3.5-0.8B
config = SimpleNamespace(
    hidden=HIDDEN, head_dim=256, kv_heads=2, stored=None, linear="xla", eps=1e-6
)
pages = mixer.pages(config, BlockSizes(16, 2, 256, "bfloat16", 256), "bfloat16")
graphdef, params = nnx.split(nnx.eval_shape(lambda: mixer.layer(config, "bfloat16")))
shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)
array = shape(PAGES, 2, 16, 256, dtype=jnp.bfloat16)

def facts(impl, tokens):
    attend = attention.attend("xla", 1.0, states=impl)

    def layer(params, k, v, x, positions, slots, tables, seq_lens, cu_q_lens):
        offsets = None if tokens == ROWS else cu_q_lens  # decodes alone
        extras = (LayerTables(slots, tables),)
        rows = (slots[0], tables[0], seq_lens, offsets, None, None, None, None, extras)
        y, arrays = nnx.merge(graphdef, params)(
            x, Pages(k=k, v=v), Batch(positions, positions, *rows), None, attend, norm=None
        )
        return arrays["k"], arrays["v"], y

    arguments = (
        jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), params),
        array,
        array,
        shape(tokens, HIDDEN, dtype=jnp.bfloat16),
        shape(tokens),
        shape(pages, tokens),
        shape(pages, ROWS, WIDTH),
        shape(ROWS),
        shape(ROWS + 1),
    )
    program = jax.jit(layer, donate_argnums=(1, 2))
    compiled = aot_tpu.lower(program, arguments, "v5e").compile()
    copies = whole_arrays(hlo.parse(compiled.as_text()), PAGES * 2 * 16 * 256 * 2)
    in_place = {"parameter", "get-tuple-element", "custom-call", "tuple", "bitcast"}
    copies = {name: count for name, count in copies.items() if name not in in_place}
    return copies, compiled.memory_analysis().temp_size_in_bytes / 1e6

for impl, tokens in (("pallas_tpu", 512), ("pallas_tpu", 64), ("xla", 64)):
    copies, megabytes = facts(impl, tokens)
    print(json.dumps([impl, tokens, copies, round(megabytes)]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(aot_tpu.what_is_missing()), reason="libtpu is not installed")
def test_kernels_change_pages_in_place_where_plain_xla_copies_whole_arrays():
    import json

    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
    of_chunks, of_decodes, of_xla = lines
    assert of_chunks[2] == of_decodes[2] == {}
    assert of_xla[2].get("reshape", 0) > 0, (
        "plain XLA copies no more: are the kernels still of use?"
    )
    array_megabytes = 134
    assert of_chunks[3] < array_megabytes
    assert of_xla[3] > 2 * array_megabytes
