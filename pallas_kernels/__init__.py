"""Attention kernels over a paged KV cache. Needs JAX alone and is useful without pagedjax.

Each operation has a folder: `paged_attention/`, `kv_write/`, `linear/`. `shared/` has code of
several operations, and `tiles/` has the sizes of the kernels' tiles for each device. `aot`, `tune`
and `timing` are tools.

Outside `cpu/` folders, modules import only JAX and the standard library. A `cpu/` folder has
compiled CPU code, not Pallas. It also imports llvmlite and numpy (the `cpu` extra), which are
loaded when the kernel is first used.
"""
