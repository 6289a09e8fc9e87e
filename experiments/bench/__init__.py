"""Benchmarks: each module answers one question and is a command, `python -m experiments.bench.NAME
--help`.

A benchmark measures a part of the engine, or the engine beside another one. `harness` has what
benchmarks share: the command line, runs in turn, tables, the file of `--json`. Sweeps over configs
belong to `experiments.run`, and programs that need a GPU or a TPU to `hardware/`.
"""
