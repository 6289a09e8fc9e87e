"""The options of a policy's training run that decide its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """The options of a run. Numbers are counts of tokens or requests, if nothing else is said.

    steps: updates of the parameters.
    method: "evolution" or "gradient" (policy_methods.py).
    reward: "latency", "goodput", "fairness", or your own as "file.py:NAME" (`environment.Reward`).
    requests: of an episode.
    rate: requests a second.
    spread: of the predicted lengths, see `workloads.Poisson`.
    units: of the hidden layer of the network.
    patience: arrivals by which the network can move a sequence in the queue.
    pairs: half of the candidates (of "evolution") or copies (of "gradient") of a step.
    worlds: episodes that each candidate or copy plays.
    held_out: episodes of the comparison. simulated: how many of them the simulator plays too.
    sigma: the distance of candidates from the parameters, of "evolution".
    temperature: of the draws of "gradient", in arrivals.
    learning_rate: of Adam.
    """

    steps: int = 120
    method: str = "evolution"
    reward: str = "latency"
    requests: int = 64
    rate: float = 24.0
    spread: float = 0.7
    units: int = 16
    patience: int = 64
    pairs: int = 16
    worlds: int = 32
    held_out: int = 256
    simulated: int = 16
    sigma: float = 0.1
    temperature: float = 4.0
    learning_rate: float = 0.05
    seed: int = 0
    chip: str = "h200"
    model: str = "llama-3-8b"
    block_size: int = 16
    num_blocks: int = 320
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
