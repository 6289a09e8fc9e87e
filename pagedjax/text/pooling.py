"""Pooled prompts as a user asks for them and gets them back, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from pagedjax.host.types import FinishReason
from pagedjax.options.params import NO_HEAD, PoolingParams, PoolingTask, PoolingType
from pagedjax.options.vllm_names import prompts

Output = TypeVar("Output")
NO_POOLING_NAMED = (
    "this model was not made for embeddings: its files name no pooling, and a model that was "
    "trained to generate has not learned to give similar texts similar vectors; use an embedding "
    "model if that matters"
)


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """The hidden states of a prompt.

    data: float32, [H], or [tokens, H] for the task "token_embed".
    """

    data: np.ndarray


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity of two prompts.

    score: the cosine similarity of their embeddings, from -1 to 1.
    """

    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of a prompt that was pooled.

    num_cached_tokens: tokens of the prompt that were in the cache when it was first admitted.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    pass


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    pass


@dataclass
class PoolingBuilder:
    """A prompt under way."""

    data: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    num_cached: int | None = None

    def end(self, data: np.ndarray) -> None:
        self.data = data
        self.finish_reason = "length"  # not None: the prompt has ended


def with_task_and_pooling(
    params: PoolingParams, task: PoolingTask, model_pooling: str | None
) -> PoolingParams:
    """The parameters with a task and a kind of pooling.

    Args:
        task: the task of the method that was called.
        model_pooling: how the model's files say that it pools.

    Raises:
        ValueError: `task` is unknown, or differs from that of `params`; or the model's pooling is
            not supported.
    """
    if task not in get_args(PoolingTask):
        raise ValueError(
            f"pooling_task is {task!r:.80}; it must be 'embed' or 'token_embed': {NO_HEAD}"
        )
    if params.task not in (None, task):
        raise ValueError(
            f"task is {params.task!r}, but this method's is {task!r}; leave it out, or call encode"
        )
    params = replace(params, task=task)
    if task == "token_embed" or params.pooling_type is not None:
        return params
    if model_pooling is not None and model_pooling not in get_args(PoolingType):
        raise ValueError(
            f"the model's files ask for {model_pooling!r}, which is not supported; give "
            "pooling_type to use another kind of pooling"
        )
    kind: Any = model_pooling or "LAST"
    return replace(params, pooling_type=kind)


def last_tokens(ids: Sequence[int], params: PoolingParams, limit: int) -> Sequence[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` leaves.

    Args:
        limit: max_model_len, which is also what `truncate_prompt_tokens` -1 means.
    """
    # `prompts.last_tokens` leaves room for one token of output, and here there is no output
    return prompts.last_tokens(ids, params.truncate_prompt_tokens, limit + 1)


def embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    values = EmbeddingOutput(output.outputs.data.tolist())
    return EmbeddingRequestOutput(
        output.request_id, values, output.prompt_token_ids, output.num_cached_tokens
    )


def similarity(
    request_id: str,
    first: PoolingRequestOutput[PoolingOutput],
    second: PoolingRequestOutput[PoolingOutput],
) -> ScoringRequestOutput:
    """The cosine similarity of two prompts' vectors; 0 if one of them is all zeros."""
    a, b = (output.outputs.data.astype(np.float64) for output in (first, second))
    norms = max(np.linalg.norm(a) * np.linalg.norm(b), 1e-24)  # above 0, for vectors of zeros
    score = float(np.clip(a @ b / norms, -1, 1))
    ids = (*first.prompt_token_ids, *second.prompt_token_ids)
    cached = first.num_cached_tokens + second.num_cached_tokens
    return ScoringRequestOutput(request_id, ScoringOutput(score), ids, cached)
