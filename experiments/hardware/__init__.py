"""Programs that need a GPU, or that compile for a TPU: each is a command, `python -m
experiments.hardware.NAME`.
"""
