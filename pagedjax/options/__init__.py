"""What users give: options of an engine, of a request, and vLLM's names of both.

config.py      options of an engine; the types of its fields say their bounds
exclusions.py  which of them exclude each other, with the reason and the remedy
params.py      options of a request
own_values.py  values in a user's own files, and what these import
purity.py      whether functions of a user are pure
vllm_names/    vLLM's arguments, and what to write in their place
"""
