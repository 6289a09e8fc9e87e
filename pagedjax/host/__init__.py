"""The scheduler and its state: plain immutable Python. Imports no jax and no numpy."""
