"""Recordings as a laboratory: what a recorded run would have done under another scheduler.

`past.read` reads a recording: what came from outside, and the tokens of each sequence. `rerun.run`
runs a scheduler on that past. A token depends on its request's seed and on its position alone, so
the tokens are those that the changed run would have made.
"""
