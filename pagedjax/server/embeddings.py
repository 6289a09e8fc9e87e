"""`POST /v1/embeddings`: from its body to requests, and from vectors to JSON. Both run in a thread.

OpenAI's clients ask for base64 by default: the bytes of little-endian float32.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

import numpy as np
from fastapi.responses import Response

from pagedjax.engine.session import GenerationRequest
from pagedjax.llm import LLM
from pagedjax.options.params import PoolingParams
from pagedjax.server.schema import EmbeddingRequest, as_list, field_values
from pagedjax.text import pooling

POOLING = (
    "dimensions",
    "normalize",
    "use_activation",
    "pooling_type",
    "truncate_prompt_tokens",
    "cache_salt",
)


def requests(
    llm: LLM, body: EmbeddingRequest, priority: int, user: str, adapter: str | None
) -> list[GenerationRequest]:
    """A request for each input.

    Raises:
        ValueError: an input that is empty or too long, or a parameter that the model cannot serve.
    """
    limit = llm.engine.config.max_model_len
    size = llm.model.model.config.hidden
    params = PoolingParams(**field_values(body, POOLING))
    params = pooling.with_task_and_pooling(params, "embed", llm.model.pooling)
    if (params.dimensions or 0) > size:
        raise ValueError(
            f"dimensions is {params.dimensions}, but the model's hidden states have {size} numbers"
        )
    llm.warn_if_not_made_for_embeddings()
    inputs = as_list(body.input)
    batch = []
    for i, text_or_ids in enumerate(inputs):
        text = None
        ids = text_or_ids
        if isinstance(text_or_ids, str):
            text = text_or_ids
            ids = llm.tokenizer.encode(text, body.add_special_tokens is not False)
        ids = pooling.last_tokens(ids, params, limit)
        name = f"input {i}" if len(inputs) > 1 else "input"
        if not ids:
            raise ValueError(f"{name} is empty: it has no tokens; give it at least one")
        if len(ids) > limit:  # checked here, so that the engine's thread does not spend time on it
            raise ValueError(
                f"{name} has {len(ids)} tokens, but max_model_len is {limit}; shorten it, or set "
                f"truncate_prompt_tokens to at most {limit}"
            )
        batch.append(GenerationRequest(ids, params, text, priority, user, adapter=adapter))
    return batch


def answer(
    model: str, in_base64: bool, outputs: Sequence[pooling.PoolingRequestOutput]
) -> Response:
    """The whole response.

    Its JSON is made vector by vector, because `json.dumps` keeps Python's lock: the event loop and
    the engine get it in between.
    """
    data = [_entry(i, output.outputs.data, in_base64) for i, output in enumerate(outputs)]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}
    head = json.dumps({"object": "list", "model": model, "usage": usage})
    return Response(f'{head[:-1]}, "data": [{", ".join(data)}]}}', media_type="application/json")


def _entry(index: int, vector: np.ndarray, in_base64: bool) -> str:
    """The JSON of one vector. Raises ValueError for a NaN, which JSON cannot express."""
    values = vector.tolist()
    if in_base64:
        values = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": values}, allow_nan=False)
