"""What users give: options of an engine, of a request, and vLLM's names of both.

config.py      options of an engine; the types of its fields say their bounds
exclusions.py  which of them exclude each other, with the reason and the remedy
params.py      options of a request
own_values.py  values in a user's own files, and what these import
own_names.py   how they are named, with parameters
own_errors.py  errors inside a user's own functions, with the place
purity.py      whether functions of a user are pure
vllm_names/    vLLM's arguments, and what to write in their place
"""
