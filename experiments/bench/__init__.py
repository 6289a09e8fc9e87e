"""Benchmarks: one question a module, each `python -m experiments.bench.NAME`."""
