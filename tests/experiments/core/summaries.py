"""The summary of a run from all of its records, as the driver makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.core.config import Slo
from experiments.core.metrics import step_sums, summary, token_sums
from experiments.core.records import RequestRecord, StepRecord


def summarize(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    size: int,
    slo: Slo | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Args: size: of a block, in tokens. options: of `summary`."""
    return summary(requests, step_sums(steps), token_sums(requests), size, slo, **options)
