"""Structured outputs: which tokens can lead to an answer of the form that a request asks for.

    grammars.py   from `StructuredOutputsParams` to a `Grammar`, checked before anything is queued
    keywords.py   which keywords of JSON Schema are supported, and where a schema has another one
    matcher.py    the state of one sequence in its grammar, and the bit masks of a step

llguidance (the extra `structured`) parses and computes the masks. It is imported when the first
request needs it. The scheduler knows nothing of grammars, and the jitted step knows bit masks alone
(device/row_features/token_mask.py).
"""
