"""Adapter: transformers on torch. Options: `batch` (1), `dtype` ("float32").

Requests go in order of arrival, `batch` at a time, left-padded, each batch as long as its longest
request.
"""

from __future__ import annotations

from typing import Any

from adapter import Generate, Request, serve

PAD = 2  # token id; the attention mask hides it


def load(model: str, options: dict[str, Any]) -> tuple[Generate, str]:
    import torch  # pyright: ignore[reportMissingImports]  (the oracle extra)
    import transformers

    batch = options.pop("batch", 1)
    dtype = getattr(torch, options.pop("dtype", "float32"))
    if options:
        raise ValueError(f"unknown options {', '.join(options)}; there are batch and dtype")
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def static_batch(part: list[Request]) -> list[list[int]]:
        width = max(len(prompt) for prompt, _ in part)
        steps = max(count for _, count in part)
        padded = [[PAD] * (width - len(prompt)) + prompt for prompt, _ in part]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part]
        with torch.inference_mode():
            out = network.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(masks),
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=PAD,
            )
        return [
            row[width : width + count].tolist() for row, (_, count) in zip(out, part, strict=True)
        ]

    def generate(requests: list[Request]) -> list[list[int]]:
        parts = (requests[i : i + batch] for i in range(0, len(requests), batch))
        return [tokens for part in parts for tokens in static_batch(part)]

    return generate, f"{transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
