"""vLLM's arguments: what happens to each of them here, so that a script for vLLM runs as it is.

rows.py               a row of a table, and how arguments are read by the rows
engine_arguments.py   the table of `LLM(...)`
request_arguments.py  the tables of `SamplingParams(...)` and `BeamSearchParams(...)`
prompts.py            vLLM's mappings in place of a prompt, and prompts that are cut

It knows names and values alone. docs/design/vllm.md shows the tables.
"""
