"""Pooled prompts as a user asks for them and gets them back, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from pagedjax.host.types import FinishReason
from pagedjax.options.params import NO_HEAD, PoolingParams, PoolingTask, PoolingType

Output = TypeVar("Output")
NOT_MADE = (
    "this model was not made for embeddings: its files name no pooling, and the hidden states of a "
    "model that was trained to generate are no trained embeddings; similar texts need not be near"
)


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """data: float32, [H], or [tokens, H] for the task "token_embed"."""

    data: np.ndarray


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ScoringOutput:
    """score: the cosine similarity of two embeddings, from -1 to 1."""

    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """num_cached_tokens: of the prompt, found in the cache when the request was first admitted."""

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
        self.finish_reason = "length"


def resolved(params: PoolingParams, task: PoolingTask, model_pooling: str | None) -> PoolingParams:
    """The parameters with a task and a kind of pooling.

    Args:
        task: of the method that was called.
        model_pooling: how the model's files say that it pools.

    Raises:
        ValueError: another task than the method's, or a pooling of the model that is not supported.
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
            "pooling_type to do without"
        )
    kind: Any = model_pooling or "LAST"
    return replace(params, pooling_type=kind)


def truncated(ids: Sequence[int], params: PoolingParams, limit: int) -> Sequence[int]:
    """The tokens of a prompt that are kept, the last ones. `limit`: max_model_len."""
    count = params.truncate_prompt_tokens
    if count is None:
        return ids
    return ids[-(limit if count == -1 else count) :]


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
    """The score of two prompts. Zeros are like nothing: their score is 0."""
    a, b = (output.outputs.data.astype(np.float64) for output in (first, second))
    score = float(np.clip(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-24), -1, 1))
    ids = (*first.prompt_token_ids, *second.prompt_token_ids)
    cached = first.num_cached_tokens + second.num_cached_tokens
    return ScoringRequestOutput(request_id, ScoringOutput(score), ids, cached)
