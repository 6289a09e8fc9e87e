"""Attention kernels over a paged KV cache. Needs JAX alone and is useful without pagedjax.

One folder an operation: `paged_attention/`, `kv_write/`. `shared/` has code of several operations,
    `tiles/` has the sizes of the kernels' tiles for each device. `aot`, `tune` and `timing` are
    tools.

Outside `cpu/` folders, modules import JAX and the standard library alone. A `cpu/` folder has
compiled CPU code, not Pallas: it also imports llvmlite and numpy (the `cpu` extra), which are
loaded when the kernel is first used.
"""
