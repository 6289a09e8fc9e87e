"""Adapter: this engine. Options are those of `LLM`; `model` opens another model than the folder of
floats that all contenders get, such as a quantized file.
"""

from __future__ import annotations

from typing import Any

from adapter import Generate, Request, serve


def load(model: str, options: dict[str, Any]) -> tuple[Generate, str]:
    import pagedjax
    from pagedjax import LLM, SamplingParams

    options = {"compilation": "eager", **options}
    llm = LLM(options.pop("model", model), progress=False, **options)

    def generate(requests: list[Request]) -> list[list[int]]:
        llm.engine.reset()  # so that a round finds no blocks of an earlier one
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, pagedjax.__version__


if __name__ == "__main__":
    serve(load)
