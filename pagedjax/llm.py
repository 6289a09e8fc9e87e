"""`LLM`: text in, text out, by `generate`, `chat` and `stream`."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from numbers import Integral
from operator import index
from typing import Any

import jax
from tqdm import tqdm

import pagedjax
from pagedjax.config import Compilation, EngineConfig, from_dict
from pagedjax.device import attention, linear
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.row_features import RowFeature
from pagedjax.engine import compilations, interrupts, programs
from pagedjax.engine.adapters import no_adapters
from pagedjax.host.types import Pending
from pagedjax.params import (
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    PoolingTask,
    SamplingParams,
)
from pagedjax.processes.engines import FollowerEngine, LeaderEngine, make_engine
from pagedjax.processes.join import joined
from pagedjax.session import GenerationRequest, Params, Session, output_of
from pagedjax.text import pooling
from pagedjax.text.outputs import BeamSearchOutput, OutputBuilder, RequestOutput, beam_search_output
from pagedjax.text.pooling import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from pagedjax.text.tokenizer import TOKEN_IDS, NoTokenizer, Tokenizer
from pagedjax.tools.use import tool_use
from pagedjax.vllm_names import prompts as vllm_prompts
from pagedjax.vllm_names.engine_arguments import ARGUMENTS, EngineArguments, engine_arguments
from pagedjax.weights.draft_model import load_draft_model
from pagedjax.weights.pretrained import DEFAULT_MODEL, LoadedModel, from_params, load_model

Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all, or one for each
# a mapping as vLLM has it: {"prompt": ...}, {"prompt_token_ids": ...}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine with a tokenizer.

    Args:
        model: a path, hub id or name for `load_model`, or the result of `load_model` or
            `from_params`; None is DEFAULT_MODEL.
        params, config, tokenizer: the arguments of `from_params`, in place of `model`. With a path,
            hub id or name, `tokenizer` is another one than the model's own.
        progress: show progress bars while loading and compiling.
        compilation_cache: keep compiled programs in ~/.cache/pagedjax/xla, 1.5 GiB at most, so that
            the next process starts faster. JAX's options are restored after each compilation. If
            JAX has a cache folder already (`JAX_COMPILATION_CACHE_DIR`), that one is used, and this
            changes nothing.
        row_features: sampling options of your own (docs/design/logits-processors.md):
            `RowFeature`s, or their names, "folder/file.py:NAME". Requests set them by `extra_args`.
        engine: the fields of `EngineConfig`, by name, and what vLLM's `LLM` takes
            (docs/design/vllm.md). `compilation` is "background" here, where that is possible: the
            first answers come sooner and later ones faster. For a measurement set it to "eager",
            and also for the same bits in each run where they depend on the program of a step, as in
            16 bits or on an accelerator (docs/design/start-up.md).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | None = None,
        *,
        params: Any = None,
        config: Mapping[str, Any] | DecoderConfig | None = None,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
        progress: bool = True,
        compilation_cache: bool = True,
        row_features: RowFeature | str | Sequence[RowFeature | str] = (),
        **engine: Any,
    ) -> None:
        arguments = engine_arguments(engine)
        names, features = _features(row_features, arguments.engine.pop("row_features", ()))
        options = {
            "compilation": default_compilation(arguments.engine),
            **arguments.engine,
            "row_features": names,
        }
        engine_config = from_dict(EngineConfig, options, others=ARGUMENTS)
        with compilations.disk_cache(compilation_cache):
            self._open(
                model, params, config, tokenizer, progress, engine_config, features, arguments
            )

    def _open(
        self,
        model,
        params,
        config,
        tokenizer,
        progress: bool,
        engine_config: EngineConfig,
        row_features,
        arguments: EngineArguments,
    ) -> None:
        """Load the model and make its engine."""
        progress, owned = progress and arguments.progress, not isinstance(model, LoadedModel)
        names = ("dtype", "weight_dtype", "linear_impl", "model_family")
        formats = {name: getattr(engine_config, name) for name in names}
        if params is not None:
            if model is not None or config is None:
                raise ValueError(
                    "params come with config, what the model's config.json says, and in place of model"
                )
            model = from_params(params, config, tokenizer=tokenizer, **formats)
        elif config is not None or (tokenizer is not None and not owned):
            raise ValueError(
                "config goes with params, and tokenizer with params or a name; a loaded model has its own"
            )
        if arguments.hub and isinstance(model, LoadedModel):
            raise ValueError(
                f"{next(iter(arguments.hub))} is of a model from the hub, and this one is loaded"
            )
        if model is None:
            model = DEFAULT_MODEL
        if not isinstance(model, LoadedModel):
            _prepare_kernels(engine_config)
            places = {"mesh": engine_config.mesh, "devices": engine_config.devices}
            options = {"tokenizer": tokenizer, "hub": arguments.hub, "progress": progress}
            model = load_model(model, **formats, **places, **options)
        elif engine_config.model_family not in (None, model.family):
            what = f"model_family is {engine_config.model_family!r}, and the loaded model's is {model.family!r}"
            raise ValueError(f"{what}; leave it out, or give it to load_model")
        engine_config = replace(engine_config, model_family=model.family)
        self.tokenizer = model.tokenizer
        draft_model = load_draft_model(engine_config.speculative, model, progress=progress)
        options = {
            "row_features": row_features,
            "draft_model": draft_model,
            "owns_params": owned,
            "progress": progress,
        }
        self.engine = make_engine(
            model.model, engine_config, eos_token_ids=model.eos_token_ids, **options
        )
        # the engine's may be replaced or sleep
        self._loaded = replace(model, model=model.model._replace(params=None))
        self._warned = False
        if progress:
            tqdm.write(programs.summary(self.startup), file=sys.stderr)
        # one for all calls: a step serves all of them
        self.session = Session(self.engine, model.tokenizer, model.eos_token_ids)

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold, so that a measurement starts cold. Unfinished requests
        continue.
        """
        self.engine.reset_prefix_cache()

    @property
    def params_version(self) -> int:
        """How often `update_params` has replaced the parameters; `CompletionOutput.versions` are
        such numbers.
        """
        return self.engine.params_version

    def update_params(self, tree: Any, pending: Pending | None = None) -> None:
        """Replace the model's parameters, e.g. by a trainer's after a step. Nothing is compiled;
        arrays are copied.

        The prefix cache is emptied. Other engines of the same loaded model keep their parameters.

        Args:
            tree: as in `from_params`, in the shapes and dtypes of the model's parameters. For an
                int8 model, matrices are rounded here, or come with their scales.
            pending: what becomes of unfinished requests (docs/design/trainer-parity.md). All keep
                their tokens so far. "restart" computes their keys and values again with the new
                parameters. "keep" leaves those that are in the cache.

        Raises:
            ValueError: requests are unfinished and `pending` is None, or a parameter differs (all
                are named). The model is unchanged.
        """
        self.engine.update_params(tree, pending)

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory: the cache, and the parameters, which move to the host (1) or
        are dropped (2).

        The prefix cache is emptied, and no program is compiled again. The memory of a model that
        was given as a `LoadedModel` is free when no one else uses it; other parameters are deleted,
        also those of `llm.model`.

        Raises:
            ValueError: requests are unfinished, it sleeps already, or there is no such level.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`. After level 2 the parameters come from `update_params`, before or after
        this.

        Args:
            tags: "weights" or "kv_cache" wakes up that part alone; None is both.

        Raises:
            ValueError: an unknown tag.
        """
        self.engine.wake_up(tags)

    # adapters (docs/design/adapters.md) -----------------------------------------------------------

    def load_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | Mapping[str, tuple[Any, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load an adapter under a name, also while requests are unfinished. Nothing is compiled.

        An adapter that has the name is replaced; unfinished requests keep theirs. It stays until it
        is unloaded.

        Args:
            source: the adapter's folder, or arrays of numpy or JAX, which are copied: the factors A
                [r, in] and B [out, r] by the matrix's name in transformers, as
                `pagedjax.models.initial_factors` gives them.
            options: of arrays, as in `pagedjax.models.adapter_parts`. A folder has its own.

        Raises:
            ValueError, FileNotFoundError: the engine has no adapters, the folder or the arrays are
                none that fit the model, options come with a folder, or all `max_loras` slots are
                taken. Nothing changes.
        """
        if not isinstance(source, (str, os.PathLike, Mapping)):
            what = f"source is {type(source).__name__}; it must be the folder of an adapter"
            raise ValueError(f"{what}, or a mapping of arrays (A, B) by the matrix's name")
        if not isinstance(source, Mapping):
            if options is not None:
                what = (
                    f"options is {options!r:.80}, and a folder has its own in adapter_config.json"
                )
                raise ValueError(f"{what}; leave options out, or give arrays")
            return self._load(LoRARequest(name, lora_path=os.fspath(source)), keep=True)
        from pagedjax.weights.adapter_files import adapter_of

        request = LoRARequest(name)
        if not self.engine.config.enable_lora:
            raise no_adapters(name)
        self.engine.load_adapter(
            adapter_of(source, options or {}, self.engine.model.config, request.lora_name)
        )

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Unfinished requests continue with it.

        Raises:
            ValueError: there is no such adapter.
        """
        self.engine.unload_adapter(name)

    def _load(self, request: LoRARequest, *, keep: bool, needed: Iterable[str] = ()) -> None:
        from pagedjax.weights.adapter_files import read_adapter

        if not self.engine.config.enable_lora:
            raise no_adapters(request.lora_name)
        adapter = read_adapter(request.lora_path, self.engine.model.config, request.lora_name)
        self.engine.load_adapter(adapter, keep=keep, needed=needed)

    def _adapters(self, requests: Any, count: int) -> list[str | None]:
        """The names of the adapters of `count` prompts. Those that are not there are loaded.

        Raises:
            ValueError: something else than `LoRARequest`s, a name with two folders, or as
            `load_adapter`.
        """
        if requests is None:
            return [None] * count
        each = list(requests) if isinstance(requests, (list, tuple)) else [requests] * count
        if len(each) != count:
            raise ValueError(
                f"{len(each)} lora_request for {count} prompts; give one for all, or one for each"
            )
        wanted: dict[str, LoRARequest] = {}
        for one in each:
            if one is not None and not isinstance(one, LoRARequest):
                raise ValueError(
                    f"lora_request is {one!r:.80}; it must be a LoRARequest, or a list of them and None"
                )
            if one is not None and wanted.setdefault(one.lora_name, one).lora_path != one.lora_path:
                paths = f"{wanted[one.lora_name].lora_path!r} and {one.lora_path!r}"
                raise ValueError(
                    f"lora_request {one.lora_name!r} has the folders {paths}; give each its own name"
                )
        most = self.engine.config.max_loras
        if self.engine.config.enable_lora and len(wanted) > most:
            raise ValueError(
                f"{len(wanted)} adapters in one call, and max_loras is {most}; raise it, or make two calls"
            )
        if wanted and not self.engine.config.enable_lora:
            raise no_adapters(next(iter(wanted)))
        for name, one in wanted.items():
            here = self.engine.adapters.get(name)
            stays = here is not None and one.lora_path in ("", here.source)
            if one.lora_path and (one.load_inplace or not stays):
                self._load(one, keep=False, needed=wanted)
        return [one and one.lora_name for one in each]

    def start_profile(self, folder: str | os.PathLike[str] = "profile") -> None:
        """Write a trace of what the host and the devices do from now on, for Perfetto or XProf."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """End the trace, and write it."""
        jax.profiler.stop_trace()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode` and `decode`."""
        return self.tokenizer

    @property
    def model(self) -> LoadedModel:
        """What was loaded, with the parameters that the engine uses, on its devices."""
        return replace(self._loaded, model=self.engine.model)

    # several processes (docs/design/processes.md) -------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether requests come from process 0, which is another one."""
        return isinstance(self.engine, FollowerEngine)

    def follow(self, **options: Any) -> None:
        """Compute this process's part of what process 0 is asked for, until it calls `release` or
        ends.

        Args:
            options: as in `FollowerEngine.follow`.

        Raises:
            ValueError: this is process 0, or the only one.
        """
        if not isinstance(self.engine, FollowerEngine):
            raise ValueError("this process takes the requests; follow() is for processes from 1 on")
        self.engine.follow(**options)

    def release_followers(self) -> None:
        """Let `follow` return in the other processes. In a single process it does nothing."""
        if isinstance(self.engine, LeaderEngine):
            self.engine.release_followers()

    @property
    def startup(self) -> dict[str, Any]:
        """Seconds by stage, the number of XLA programs, and how many of them came from the cache on
        disk.
        """
        return {
            "import": pagedjax._import_seconds,
            "load": self.model.seconds,
            **self.engine.startup,
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = 0,
        user: str | Sequence[str] = "",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch. Returns the outputs in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, a mapping {"prompt": ...} or
                {"prompt_token_ids": ...}, or a list of them.
            sampling_params: one for all, or one for each; None is `SamplingParams()`.
                `BeamSearchParams` beside them run in the same steps.
            priority, user: one for all, or one for each; used by the policies "priority" (the lower
                number first) and "fair".
            lora_request: the adapter of all, or of each prompt.

        Raises:
            ValueError: a prompt or parameter that cannot be served. Nothing ran, and the engine is
            usable.
        """
        texts, prompts = zip(*map(_text_and_prompt, _several(prompts)), strict=True)
        order = (0 if priority is None else priority), user
        ids = [self._tokens(p) for p in prompts]
        return self._run(
            texts,
            ids,
            _each(sampling_params, len(ids)),
            use_tqdm,
            *order,
            lora_request=lora_request,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Search every prompt, and return the results in vLLM's form. `generate` takes
        `BeamSearchParams` too.

        Raises:
            ValueError: as `generate`, or `params` are no `BeamSearchParams`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params is {params!r:.80}; it must be BeamSearchParams")
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [beam_search_output(output, params, self.tokenizer) for output in outputs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        tool_call_parser: str | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...}.

        Args:
            tools, tool_choice, parallel_tool_calls: as in OpenAI's API (docs/design/tools.md). An
                answer's calls are its `tool_calls`, and stay in its `text` too. They are valid: a
                grammar forbids others.
            tool_call_parser: how the model writes calls, one of `tools.formats.PARSERS`; None finds
                it in the chat template.
            lora_request: as in `generate`.

        Raises:
            ValueError: as `generate`; or a tool, the choice, or a message about calls is wrong.
        """
        use = tool_use(self.tokenizer, tools, tool_choice, parallel_tool_calls, tool_call_parser)
        ids = [use.tokens(self.tokenizer, m) for m in _conversations(messages)]
        prompts = [self.tokenizer.decode(i, skip_special_tokens=False) for i in ids]
        params = [use.applied(one, self.tokenizer)[0] for one in _each(sampling_params, len(ids))]
        for one in params if use.tools else ():
            use.compiled(self.session.grammars, one)
        outputs = self._run(prompts, ids, params, use_tqdm, lora_request=lora_request)
        return [use.read(output) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Yields the text of one completion as it becomes final. Closing the iterator frees the
        request's blocks.
        """
        (params,) = _each(sampling_params, 1)
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError(
                f"this model has no tokenizer, and a stream is text; {TOKEN_IDS}, to generate"
            )
        if reason := _several_branches(params):
            raise ValueError(f"{reason}; a stream has one branch, use generate")
        if params.taps:
            raise ValueError("taps come with an output, and a stream is text; use generate")
        _, prompt = _text_and_prompt(prompt)
        ids = self._truncated(self._tokens(prompt), params)
        sent = 0
        with ExitStack() as stack:
            with interrupts.deferred(), self._turn(lora_request):
                (adapter,) = self._adapters(lora_request, 1)
                request = GenerationRequest(ids, params, adapter=adapter)
                outputs, unfinished = stack.enter_context(self.session.awaited([request]))
            (branch,) = outputs[0].values()
            assert isinstance(branch, OutputBuilder)
            running = True
            while running:
                running = self.session.step_for(unfinished) is not None
                text = branch.text
                if len(text) > sent:
                    yield text[sent:]
                    sent = len(text)

    # hidden states (docs/design/embeddings.md) ----------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt: its pooled hidden states, of length 1 unless `normalize` is
        False.

        Args:
            prompts: as in `generate`.
            pooling_params: one for all, or one for each; None is `PoolingParams()`.
            lora_request: as in `generate`.

        Raises:
            ValueError: a prompt or parameter that cannot be served. Nothing ran, and the engine is
            usable.
        """
        outputs = self._pooled(_several(prompts), pooling_params, "embed", use_tqdm, lora_request)
        return [pooling.embedding(output) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Hidden states after the last norm as arrays; arguments and errors are those of `embed`.

        Args:
            pooling_task: "token_embed" gives an array [tokens, H], "embed" a pooled one [H]; None
                is the task of the parameters, or else "token_embed". Rows have length 1 unless
                `normalize` is False.
        """
        return self._pooled(_several(prompts), pooling_params, pooling_task, use_tqdm, lora_request)

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:
        """The cosine similarity of the embeddings of two texts, for each pair.

        Args:
            text_1: one text for all of `text_2`, or one for each.
            pooling_params: as in `embed`, one for all.
            lora_request: the adapter of all texts, or of each: those of `text_1`, then those of
                `text_2`.
        """
        ones, others = _several(text_1), _several(text_2)
        if len(ones) not in (1, len(others)):
            raise ValueError(
                f"text_1 has {len(ones)} texts and text_2 {len(others)}; give one, or one for each"
            )
        found = self._pooled([*ones, *others], pooling_params, "embed", use_tqdm, lora_request)
        firsts, seconds = found[: len(ones)] * (len(others) // len(ones)), found[len(ones) :]
        pairs = zip(firsts, seconds, strict=True)
        return [pooling.similarity(str(i), one, other) for i, (one, other) in enumerate(pairs)]

    def _pooled(
        self,
        prompts: list[Prompt],
        params: Any,
        task: PoolingTask | None,
        use_tqdm: bool,
        lora_request: Any = None,
    ) -> list[Any]:
        each, own = _each(params, len(prompts), PoolingParams), self._loaded.pooling
        each = [pooling.resolved(one, task or one.task or "token_embed", own) for one in each]
        limit = self.engine.config.max_model_len
        texts, plain = zip(*map(_text_and_prompt, prompts), strict=True)
        ids = [
            pooling.truncated(self._tokens(p), one, limit)
            for p, one in zip(plain, each, strict=True)
        ]
        self.warn_if_not_made_for_embeddings()
        return self._run(texts, ids, each, use_tqdm, what="embedding", lora_request=lora_request)

    def warn_if_not_made_for_embeddings(self) -> None:
        """One warning, once, for a model whose hidden states were not trained to be embeddings."""
        if self._loaded.pooling is None and not self._warned:
            self._warned = True
            warnings.warn(pooling.NOT_MADE, UserWarning, stacklevel=4)

    # ------------------------------------------------------------------------------------------------------------

    def _truncated(self, ids: list[int], params: Params) -> Sequence[int]:
        """The tokens that `truncate_prompt_tokens` keeps."""
        count = params.truncate_prompt_tokens if isinstance(params, SamplingParams) else None
        return (
            ids
            if count is None
            else vllm_prompts.kept(ids, count, self.engine.config.max_model_len)
        )

    def _tokens(self, prompt: Any) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not ids:
            raise ValueError("the prompt is empty: it has no tokens; give it at least one")
        return ids

    def _run(
        self,
        texts,
        ids,
        params,
        use_tqdm: bool,
        priority: Any = 0,
        user: Any = "",
        what: str = "generating",
        lora_request: Any = None,
    ) -> list[Any]:
        """The outputs of prompts, whose tokens are `ids`, with parameters of generation or pooling
        for each.
        """
        priorities = _one_each("priority", priority, int, len(ids))
        users = _one_each("user", user, str, len(ids))
        with ExitStack() as stack:
            with interrupts.deferred(), self._turn(lora_request):
                adapters = self._adapters(lora_request, len(ids))
                columns = zip(ids, texts, params, priorities, users, adapters, strict=True)
                requests = [
                    GenerationRequest(
                        self._truncated(tokens, p), p, text, rank, name, adapter=adapter
                    )
                    for tokens, text, p, rank, name, adapter in columns
                ]
                outputs, unfinished = stack.enter_context(self.session.awaited(requests))
            total = len(unfinished)
            bar = stack.enter_context(
                tqdm(total=total, desc=what, unit="seq", disable=not use_tqdm, leave=False)
            )
            tokens, started = 0, time.perf_counter()
            while step := self.session.step_for(unfinished):
                bar.update(total - len(unfinished) - bar.n)
                tokens += step.tokens
                bar.set_postfix_str(
                    f"{tokens / (time.perf_counter() - started):.0f} tokens/s", refresh=False
                )
        each = enumerate(zip(requests, outputs, strict=True))
        return [output_of(str(i), request, branches) for i, (request, branches) in each]

    def _turn(self, lora_request: Any) -> AbstractContextManager[None]:
        """One turn from the loading of adapters to the requests for them, which no other thread may
        come between.
        """
        return nullcontext() if lora_request is None else self.session.turns


def default_compilation(engine: Mapping[str, Any]) -> Compilation:
    """Of an `LLM` with these options: behind the steps, wherever an engine can compile there."""
    alone = joined() is None and jax.process_count() == 1
    return "background" if alone and not engine.get("speculative") else "eager"


def _prepare_kernels(config: EngineConfig) -> None:
    """Starts what kernels need once a process, before the model is read."""
    dtype = config.dtype or "float32"
    kept = config.kv_cache_dtype or dtype
    attention.prepare(
        config.attention_impl, dtype=kept, query_dtype=dtype, invariant=config.batch_invariant
    )
    weight_dtype = config.weight_dtype or dtype
    linear.prepare(
        config.linear_impl, dtype=dtype, weight_dtype=weight_dtype, low_rank=config.enable_lora
    )


def _features(given: Any, processors: Any) -> tuple[tuple[str, ...], tuple[RowFeature, ...]]:
    """Sampling options of one's own: those that are named, and those that are values.

    Args:
        processors: what was given as `logits_processors`.

    Raises:
        ValueError: both are given, or one is neither a name nor a `RowFeature`.
    """
    several = [
        (one,) if isinstance(one, (str, RowFeature)) else tuple(one) for one in (given, processors)
    ]
    if all(several):
        raise ValueError(
            "logits_processors is vLLM's name of row_features, and both are given; leave one of them out"
        )
    features = several[0] or several[1]
    for one in features:
        if not isinstance(one, (str, RowFeature)):
            raise ValueError(
                f"row_features has {one!r:.80}; write a RowFeature, or give folder/file.py:NAME of one"
            )
    named = tuple(one for one in features if isinstance(one, str))
    return named, tuple(one for one in features if isinstance(one, RowFeature))


def _text_and_prompt(prompt: Any) -> tuple[str | None, Any]:
    """The text of a prompt, if it has one, and what its tokens come from."""
    if isinstance(prompt, Mapping):
        return vllm_prompts.text_and_prompt(prompt)
    return (prompt if isinstance(prompt, str) else None), prompt


def _several(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is {prompts!r:.80}; give a string, token ids, a mapping, or a list of them"
        )
    several: list[Any] = list(prompts)
    if not several:
        raise ValueError(
            "there are no prompts; give a string, token ids, a mapping, or a list of them"
        )
    return [several] if isinstance(several[0], Integral) else several


def _token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise ValueError(
            f"a prompt is {prompt!r:.80}; it must be a string or a list of token ids"
        ) from None


def _conversations(messages: Any) -> list[Any]:
    several: list[Any] = list(messages) if isinstance(messages, (list, tuple)) else []
    if several and isinstance(several[0], Mapping):
        several = [several]
    if not several or not all(isinstance(conversation, (list, tuple)) for conversation in several):
        form = "[{'role': 'user', 'content': ...}, ...]"
        raise ValueError(
            f"messages is {messages!r:.80}; give a conversation, {form}, or a list of conversations"
        )
    return several


def _several_branches(params: SamplingParams | BeamSearchParams) -> str:
    """Why a request has more than one branch; empty for one of one branch."""
    if isinstance(params, BeamSearchParams):
        return "beam search"
    if params.n != 1:
        return f"n is {params.n}"
    return f"best_of is {params.best_of}" if params.drawn().n != 1 else ""


def _each(params: Any, count: int, kind: Any = Params) -> list[Any]:
    """Parameters of a kind for each of `count` prompts; None is the default of the kind."""
    pools = kind is PoolingParams
    default, name = (
        (PoolingParams, "pooling_params") if pools else (SamplingParams, "sampling_params")
    )
    if params is None or isinstance(params, kind):
        return [params or default()] * count
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for one in each:
        if not isinstance(one, kind):
            known = "PoolingParams" if pools else "SamplingParams or BeamSearchParams"
            raise ValueError(f"{name} is {one!r:.80}; it must be {known}, or a list of them")
    if len(each) != count:
        raise ValueError(
            f"{len(each)} {default.__name__} for {count} prompts; give one for all, or one for each"
        )
    return each


def _one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    if isinstance(value, kind) and not isinstance(value, bool):
        return [value] * count
    each = list(value) if isinstance(value, (list, tuple)) else [value]
    for one in each:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise ValueError(
                f"{name} is {one!r:.80}; it must be of type {kind.__name__}, or a list of them"
            )
    if len(each) != count:
        raise ValueError(
            f"{len(each)} values of {name} for {count} prompts; give one for all, or one for each"
        )
    return each
