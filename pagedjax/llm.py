"""Text in, text out: `LLM.generate`, `LLM.chat`, `LLM.stream`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import Any

from tqdm import tqdm

import pagedjax
from pagedjax import attention, monitor, programs
from pagedjax.config import EngineConfig, from_dict
from pagedjax.engine import Engine
from pagedjax.loaded import DEFAULT_MODEL, LoadedModel, from_params, load_model
from pagedjax.models.decoder import DecoderConfig
from pagedjax.outputs import Assembly, BeamAssembly, CompletionOutput, RequestOutput
from pagedjax.params import BeamSearchParams, SamplingParams
from pagedjax.tokenizer import TOKEN_IDS, NoTokenizer, Tokenizer
from pagedjax.types import Admitted, Finished, FinishReason, Sampled

Prompt = str | Sequence[int]
Params = SamplingParams | BeamSearchParams
Branches = dict[str, Assembly | BeamAssembly]  # by the id the engine knows them by; of a beam search, the first


class LLM:
    """An engine with a tokenizer.

    Args:
        model: what `load_model` opens, or what it or `from_params` returned; None is DEFAULT_MODEL.
        params, config, tokenizer: in place of `model`, what `from_params` takes.
        progress: show progress bars while loading and compiling.
        engine: the fields of `EngineConfig`, by name.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | None = None,
        *,
        params: Any = None,
        config: Mapping[str, Any] | DecoderConfig | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        progress: bool = True,
        **engine: Any,
    ) -> None:
        engine_config = from_dict(EngineConfig, engine)
        monitor.keep_compilations()
        if params is not None:
            if model is not None or config is None:
                raise ValueError("params come with config, what the model's config.json says, and in place of model")
            dtypes = {"dtype": engine_config.dtype, "weight_dtype": engine_config.weight_dtype}
            model = from_params(params, config, tokenizer=tokenizer, **dtypes)
        elif config is not None or tokenizer is not None:
            raise ValueError("config and tokenizer go with params; a folder, file or loaded model has its own")
        if model is None:
            model = DEFAULT_MODEL
        if not isinstance(model, LoadedModel):
            kept = engine_config.kv_cache_dtype or engine_config.dtype or "float32"
            attention.prepare(engine_config.attention_impl, kept)
            dtypes = {"dtype": engine_config.dtype, "weight_dtype": engine_config.weight_dtype}
            model = load_model(model, **dtypes, progress=progress)
        wanted, loaded = engine_config.dtype, model.model.dtype
        if wanted not in (None, loaded):
            raise ValueError(f"dtype is {wanted!r}, but the model was loaded with {loaded!r}; load it again")
        self.model = model
        self.tokenizer = model.tokenizer
        self.engine = Engine(model.model, engine_config, eos_token_ids=model.eos_token_ids, progress=progress)
        if progress:
            tqdm.write(programs.summary(self.startup), file=sys.stderr)
        self._requests = 0
        self._branches: Branches = {}  # those under way, of every call, for a step serves them all

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold, so that a measurement starts cold. Requests under way go on."""
        self.engine.reset_prefix_cache()

    def update_params(self, tree: Any) -> None:
        """Give the model other values, e.g. a trainer's after a step, without compiling anything. They are copied.

        What the prefix cache holds is forgotten. Other engines of the same loaded model keep theirs.

        Args:
            tree: as in `from_params`, in the shapes and dtypes of the model's parameters. Of a model in int8 the
                matrices are rounded on their way in, or come with their scales.

        Raises:
            ValueError: requests are under way, or a parameter differs (all are named). The model is as it was.
        """
        self.engine.update_params(tree)
        self.model = replace(self.model, model=self.engine.model)

    @property
    def startup(self) -> dict[str, Any]:
        """Seconds by stage, how many XLA programs were made, and how many of them came from the cache on disk."""
        return {"import": pagedjax._import_seconds, "load": self.model.seconds, **self.engine.startup}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        user: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete prompts, all together, in order.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all, or one for each; None is `SamplingParams()`. `BeamSearchParams` beside them
                run in the same steps.
            priority, user: one for all, or one for each: what the policies "priority" (the lower number first) and
                "fair" go by.

        Raises:
            ValueError: a prompt or parameter that cannot be served. Nothing has run then, and the engine is usable.
        """
        prompts = _several(prompts)
        return self._run(prompts, [self._tokens(p) for p in prompts], sampling_params, use_tqdm, priority, user)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...}."""
        ids = [self.tokenizer.apply_chat_template(m) for m in _conversations(messages)]
        prompts = [self.tokenizer.decode(i, skip_special_tokens=False) for i in ids]
        return self._run(prompts, ids, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece as it becomes final. Closing the iterator frees its blocks."""
        (params,) = _each(sampling_params, 1)
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError(f"this model has no tokenizer, and a stream is text; {TOKEN_IDS}, to generate")
        if isinstance(params, BeamSearchParams) or params.n != 1:
            what = "beam search" if isinstance(params, BeamSearchParams) else f"n is {params.n}"
            raise ValueError(f"{what}; a stream has one branch, use generate")
        (mine,) = self._add([self._tokens(prompt)], [params], [0], [""])
        (branch,) = mine.values()
        assert isinstance(branch, Assembly)
        sent, ended = 0, False
        try:
            while not ended:
                ended = branch.finish_reason is not None  # another call's steps may have brought the end
                if not ended:
                    self._step()
                if len(branch.text) > sent:
                    sent, piece = len(branch.text), branch.text[sent:]
                    yield piece
        finally:
            self._abandon(mine)

    # ------------------------------------------------------------------------------------------------------------

    def _tokens(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not ids:
            raise ValueError("the prompt is empty: it has no tokens; give it at least one")
        return ids

    def _run(
        self, prompts, ids, sampling_params, use_tqdm: bool, priority: Any = 0, user: Any = ""
    ) -> list[RequestOutput]:
        params = _each(sampling_params, len(ids))
        priorities = _one_each("priority", priority, int, len(ids))
        requests = self._add(ids, params, priorities, _one_each("user", user, str, len(ids)))
        mine = {name: branch for branches in requests for name, branch in branches.items()}
        left = set(mine)
        try:
            with tqdm(total=len(mine), desc="generating", unit="seq", disable=not use_tqdm, leave=False) as bar:
                tokens, started = 0, time.perf_counter()
                while left:
                    pieces, ended = self._step()
                    bar.update(len(left.intersection(ended)))
                    left.difference_update(ended)
                    tokens += pieces
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False)
        finally:
            self._abandon(mine)

        outputs = []
        for prompt, p, tokens, branches in zip(prompts, params, ids, requests, strict=True):
            leader, *_ = several = list(branches.values())
            outputs.append(
                RequestOutput(
                    request_id=str(len(outputs)),
                    prompt=prompt if isinstance(prompt, str) else None,
                    prompt_token_ids=tuple(tokens),
                    outputs=leader.completions() if isinstance(leader, BeamAssembly) else _best(several, p),
                    prompt_logprobs=leader.prompt_positions() if isinstance(leader, Assembly) else None,
                    num_cached_tokens=leader.num_cached or 0,
                )
            )
        return outputs

    def _add(
        self,
        ids: Sequence[Sequence[int]],
        params: Sequence[Params],
        priorities: Sequence[int],
        users: Sequence[str],
    ) -> list[Branches]:
        """Queue every request, or none -> the branches of each."""
        for p in params:
            if isinstance(self.tokenizer, NoTokenizer) and isinstance(p, SamplingParams) and p.stop:
                raise ValueError(f"stop is {p.stop!r}, but this model has no tokenizer and no text; use stop_token_ids")
        requests: list[Branches] = []
        try:
            for tokens, p, priority, user in zip(ids, params, priorities, users, strict=True):
                p = p if isinstance(p, BeamSearchParams) else p.drawn()
                width = p.beam_width if isinstance(p, BeamSearchParams) else p.n
                names = [f"{self._requests + i}" for i in range(width)]
                self.engine.add(names[0], tokens, p, forks=names[1:], priority=priority, user=user)
                self._requests += width
                requests.append(self._assemblies(names, tokens, p))
        except ValueError:
            for branches in requests:
                self._abandon(branches)
            raise
        for branches in requests:
            self._branches |= branches
        return requests

    def _assemblies(self, names: Sequence[str], tokens: Sequence[int], p: Params) -> Branches:
        parts = self.tokenizer, tokens, frozenset(self.model.eos_token_ids)
        if isinstance(p, BeamSearchParams):
            return {names[0]: BeamAssembly(p, *parts)}
        return {name: Assembly(i, p, *parts) for i, name in enumerate(names)}

    def _step(self) -> tuple[int, list[str]]:
        """One step of the engine, folded into the branches it served -> (tokens, ids of the branches that ended)."""
        result = self.engine.step()
        assert result is not None, "branches are under way, so the engine has work"
        branches = self._branches
        for entry in result.logprobs:
            if isinstance(branch := branches.get(entry.request_id), Assembly):
                branch.take(entry)
        reasons: dict[str, FinishReason] = {e.request_id: e.reason for e in result.events if isinstance(e, Finished)}
        tokens, ended = 0, []
        for event in result.events:
            if isinstance(event, Admitted) and event.request_id in branches:
                branch = branches[event.request_id]
                branch.num_cached = event.num_cached if branch.num_cached is None else branch.num_cached
            if not isinstance(event, Sampled):
                continue
            for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                branch = branches.get(request_id)
                if not isinstance(branch, Assembly):
                    continue
                branch.push(token, reasons.get(request_id))
                tokens += 1
                if branch.finish_reason is not None:
                    del branches[request_id]
                    ended.append(request_id)
                    if request_id not in reasons:  # a stop string: the scheduler has to be told
                        self.engine.cancel(request_id, "stop")
        for request_id, sequences in result.beams:
            branch = branches.pop(request_id, None)
            if isinstance(branch, BeamAssembly):
                branch.end(sequences)
                tokens += sum(len(one.token_ids) for one in sequences)
                ended.append(request_id)
        return tokens, ended

    def _abandon(self, branches: Branches) -> None:
        """End those of a call that are still under way."""
        for request_id, branch in branches.items():
            if branch.finish_reason is None:
                self._branches.pop(request_id, None)
                self.engine.cancel(request_id)


def _best(branches: Sequence[Any], params: Any) -> tuple[CompletionOutput, ...]:
    """All branches; or of `best_of`, the n of the largest summed log-probability, the best first."""
    if params.drawn().n > params.n:
        branches = sorted(branches, key=lambda branch: -branch.cumulative)[: params.n]
    outputs = (branch.completion() for branch in branches)
    shown = params.logprobs is not None
    return tuple(
        replace(output, index=i, logprobs=output.logprobs if shown else None) for i, output in enumerate(outputs)
    )


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r:.80}; give a string, token ids, or a list of either")
    several: list[Any] = list(prompts)
    if not several:
        raise ValueError("there are no prompts; give a string, token ids, or a list of either")
    return [several] if isinstance(several[0], Integral) else several


def _token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt is {prompt!r:.80}; it must be a string or a list of token ids") from None


def _conversations(messages: Any) -> list[Any]:
    several: list[Any] = list(messages) if isinstance(messages, (list, tuple)) else []
    if several and isinstance(several[0], Mapping):
        several = [several]
    if not several or not all(isinstance(conversation, (list, tuple)) for conversation in several):
        form = "[{'role': 'user', 'content': ...}, ...]"
        raise ValueError(f"messages is {messages!r:.80}; give a conversation, {form}, or a list of conversations")
    return several


def _each(params: Params | Sequence[Params] | None, count: int) -> list[Any]:
    if params is None or isinstance(params, Params):
        return [params or SamplingParams()] * count
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for one in each:
        if not isinstance(one, Params):
            raise ValueError(
                f"sampling_params is {one!r:.80}; it must be SamplingParams or BeamSearchParams, or a list of them"
            )
    if len(each) != count:
        raise ValueError(f"{len(each)} SamplingParams for {count} prompts; give one for all, or one for each")
    return each


def _one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    if isinstance(value, kind) and not isinstance(value, bool):
        return [value] * count
    each = list(value) if isinstance(value, (list, tuple)) else [value]
    for one in each:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise ValueError(f"{name} is {one!r:.80}; it must be of type {kind.__name__}, or a list of them")
    if len(each) != count:
        raise ValueError(f"{len(each)} values of {name} for {count} prompts; give one for all, or one for each")
    return each
