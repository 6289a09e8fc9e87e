"""A plain generation loop in PyTorch, as a researcher would write it: one batch of fixed shape, a
cache of fixed length, scaled_dot_product_attention, and on a GPU one CUDA graph for each length.

All requests are one batch, whose rows stay until the longest request ends. Prompts are padded on
the right and computed some rows at a time. A decode step reads the cache up to a multiple of
`SPACING` tokens that holds the longest row, and masks what a row does not have. The products and
norms are those of transformers' modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.hardware.gpu_engine import Request

SPACING = 256  # tokens of the cache between two graphs
PROMPT_ROWS = 16  # rows whose prompts are computed together
ALIGNED = 8  # numbers of a row of a mask, as kernels with masks want it
SYNCHRONISED = 128  # steps after which the loop looks at the clock
WARM_STEPS = 3  # calls before a graph is captured, as torch asks for


@dataclass
class Loop:
    """A batch of B rows with room for L tokens.

    Attributes:
        keys, values: of each layer, [B, key heads, L, D].
        tokens: [B] the newest token of each row.
        positions: [B] the positions of these tokens.
        temperature: 0 takes the best token.
    """

    model: Any
    keys: list[Any]
    values: list[Any]
    tokens: Any
    positions: Any
    temperature: float

    @staticmethod
    def of(model: Any, rows: int, length: int, temperature: float) -> Loop:
        """An empty loop. model: a LlamaForCausalLM of transformers."""
        import torch  # pyright: ignore[reportMissingImports]  (not a dependency)

        config = model.config
        shape = rows, config.num_key_value_heads, length, config.head_dim
        place = {"device": model.device, "dtype": model.dtype}
        layers = range(config.num_hidden_layers)
        return Loop(
            model,
            keys=[torch.zeros(shape, **place) for _ in layers],
            values=[torch.zeros(shape, **place) for _ in layers],
            tokens=torch.zeros(rows, dtype=torch.long, device=model.device),
            positions=torch.zeros(rows, dtype=torch.long, device=model.device),
            temperature=temperature,
        )

    def read_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute all prompts, and sample the first token of each row."""
        import torch  # pyright: ignore[reportMissingImports]

        device = self.model.device
        for first in range(0, len(prompts), PROMPT_ROWS):
            part = prompts[first : first + PROMPT_ROWS]
            longest = max(len(prompt) for prompt in part)
            padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in part]
            positions = torch.arange(longest, device=device).expand(len(part), -1)
            rows = torch.arange(first, first + len(part), device=device)
            hidden = self._hidden(torch.tensor(padded, device=device), positions, rows, None)
            ends = torch.tensor([len(prompt) for prompt in part], device=device)
            newest = hidden[torch.arange(len(part), device=device), ends - 1]
            self.tokens[rows] = self._sampled(newest)
            self.positions[rows] = ends

    def decode(self, length: int) -> None:
        """Compute the newest token of each row, and sample the next one.

        length: of the cache that is read; more than any position.
        """
        import torch  # pyright: ignore[reportMissingImports]

        device = self.model.device
        seen = torch.arange(length, device=device) <= self.positions[:, None]
        rows = torch.arange(len(self.tokens), device=device)
        hidden = self._hidden(
            self.tokens[:, None], self.positions[:, None], rows, seen[:, None, None]
        )
        self.tokens.copy_(self._sampled(hidden[:, 0]))
        self.positions.add_(1)

    def _hidden(self, tokens: Any, positions: Any, rows: Any, seen: Any) -> Any:
        """[B, T, H] after the final norm.

        Args:
            tokens, positions: [B, T].
            rows: [B] of the cache.
            seen: [B, 1, 1, length] which tokens of the cache a query sees; None: the tokens are
                whole prompts, and causal attention is among themselves.
        """
        from torch.nn.functional import (  # pyright: ignore[reportMissingImports]
            scaled_dot_product_attention,
        )
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        decoder = self.model.model
        x = decoder.embed_tokens(tokens)
        cos_sin = decoder.rotary_emb(x, positions)
        for i, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            heads = [
                projection(y).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for projection in projections
            ]
            q, k = apply_rotary_pos_emb(*heads[:2], *cos_sin)
            v = heads[2]
            self.keys[i][rows[:, None], :, positions] = k.transpose(1, 2)
            self.values[i][rows[:, None], :, positions] = v.transpose(1, 2)
            if seen is None:
                z = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                # The query heads of a key head are its queries: kernels that take masks do not let
                # heads share keys.
                length = seen.shape[-1]
                k = self.keys[i][:, :, :length]
                v = self.values[i][:, :, :length]
                z = scaled_dot_product_attention(q.view(*k.shape[:2], -1, k.shape[3]), k, v, seen)
                z = z.view(q.shape)
            x = x + attention.o_proj(z.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return decoder.norm(x)

    def _sampled(self, hidden: Any) -> Any:
        """[B] tokens drawn after the hidden states [B, H]."""
        import torch  # pyright: ignore[reportMissingImports]

        logits = self.model.lm_head(hidden).float()
        if self.temperature:
            # the largest weight over an exponential draw is a draw by the weights
            weights = torch.softmax(logits / self.temperature, -1)
            logits = weights / torch.empty_like(weights).exponential_()
        return logits.argmax(-1)


def steps_of(loop: Loop, longest: int) -> dict[int, Callable[[], None]]:
    """Decode steps by the length of the cache that they read; on a GPU each is a CUDA graph.

    They change the loop's tokens, so make them before the prompts are computed.
    """
    import torch  # pyright: ignore[reportMissingImports]

    lengths = [*range(SPACING, longest, SPACING), longest]
    if loop.model.device.type != "cuda":
        return {length: partial(loop.decode, length) for length in lengths}
    steps: dict[int, Callable[[], None]] = {}
    pool = None  # memory that all graphs share, because one runs at a time; the longest needs most
    for length in reversed(lengths):
        loop.positions.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                loop.decode(length)
        torch.cuda.current_stream().wait_stream(stream)
        loop.positions.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            loop.decode(length)
        pool = pool or graph.pool()
        steps[length] = graph.replay
    return steps


def generate(
    model: Any, requests: Sequence[Request], temperature: float
) -> tuple[Callable[[float], list[list[int]]], int]:
    """Prepare a batch of requests -> (the function that computes it, the bytes of its cache).

    The function takes the time by time.perf_counter at which it gives up, and returns the output
    tokens of each request. It raises RuntimeError if the time is over. The first call may be
    slower.
    """
    import torch  # pyright: ignore[reportMissingImports]

    prompts = [prompt for prompt, _ in requests]
    longest = max(len(prompt) + count for prompt, count in requests)
    longest = -(-longest // ALIGNED) * ALIGNED
    num_steps = max(count for _, count in requests)
    loop = Loop.of(model, len(requests), longest, temperature)
    with torch.inference_mode():
        steps = steps_of(loop, longest)
    longest_prompt = max(map(len, prompts))

    @torch.inference_mode()
    def run(end: float) -> list[list[int]]:
        loop.read_prompts(prompts)
        columns = [loop.tokens.clone()]
        for step in range(1, num_steps):
            if step % SYNCHRONISED == 0:
                columns[-1].tolist()  # waits for the device, so that the time is known
                if time.perf_counter() > end:
                    raise RuntimeError(
                        f"step {step} of {num_steps} of the loop was not done when the time was "
                        "over; raise --seconds"
                    )
            # a row that has ended goes on in the last place of the cache
            loop.positions.clamp_(max=longest - 1)
            needed = min(longest_prompt + step, longest)
            steps[min(length for length in steps if length >= needed)]()
            columns.append(loop.tokens.clone())
        tokens = torch.stack(columns, 1).tolist()
        return [row[:count] for row, (_, count) in zip(tokens, requests, strict=True)]

    cache_bytes = sum(layer.nbytes for layer in (*loop.keys, *loop.values))
    return run, cache_bytes
