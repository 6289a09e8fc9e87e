"""Adapter: OpenVINO GenAI with continuous batching. Options: `dtype` ("float32" or "bfloat16"),
`max_num_seqs` (256), `cache_gb` (4), `max_num_batched_tokens` (256).

Its Python needs openvino-genai, and once, to turn the checkpoint into OpenVINO's format,
optimum-intel and torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter import Generate, Request, serve


def load(model: str, options: dict[str, Any]) -> tuple[Generate, str]:
    import numpy as np
    import openvino  # pyright: ignore[reportMissingImports]  (a peer's own Python has it)
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    dtype = options.pop("dtype", "float32")
    places = options.pop("max_num_seqs", 256)
    cache = options.pop("cache_gb", 4)
    budget = options.pop("max_num_batched_tokens", 256)
    if options or dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"options {options or dtype}; there are dtype (float32, bfloat16), max_num_seqs, "
            "cache_gb and max_num_batched_tokens"
        )
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache
    scheduler.max_num_seqs = places
    scheduler.max_num_batched_tokens = budget
    scheduler.enable_prefix_caching = False
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    pipeline = genai.ContinuousBatchingPipeline(
        str(converted(Path(model))), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": precision}
    )

    def settings(count: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config

    def generate(requests: list[Request]) -> list[list[int]]:
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        results = pipeline.generate(ids, [settings(count) for _, count in requests])
        return [list(result.m_generation_ids[0]) for result in results]

    return generate, openvino.__version__.split("-")[0]


def converted(folder: Path) -> Path:
    """The model in OpenVINO's format, beside the checkpoint; made on first use."""
    target = folder.with_name(folder.name + ".openvino")
    if not (target / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM  # pyright: ignore[reportMissingImports]

        OVModelForCausalLM.from_pretrained(
            folder, export=True, compile=False, load_in_8bit=False
        ).save_pretrained(target)
    return target


if __name__ == "__main__":
    serve(load)
