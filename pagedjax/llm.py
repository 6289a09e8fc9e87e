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
from typing import Any, cast

import jax
from tqdm import tqdm

import pagedjax
from pagedjax.device import attention, formats, linear
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.row_features import RowFeature
from pagedjax.engine import compilations, interrupts, programs
from pagedjax.engine.adapters import no_adapters
from pagedjax.engine.own_checks import check_own_values
from pagedjax.engine.processes.engines import FollowerEngine, LeaderEngine, make_engine
from pagedjax.engine.processes.join import joined
from pagedjax.engine.session import GenerationRequest, Params, Session, output_of
from pagedjax.host.types import Pending
from pagedjax.options.config import AS_STORED, Compilation, EngineConfig, from_dict
from pagedjax.options.params import (
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    PoolingTask,
    SamplingParams,
)
from pagedjax.options.vllm_names import prompts as vllm_prompts
from pagedjax.options.vllm_names.engine_arguments import (
    ARGUMENTS,
    EngineArguments,
    engine_arguments,
)
from pagedjax.text import pooling
from pagedjax.text.outputs import BeamSearchOutput, OutputBuilder, RequestOutput, beam_search_output
from pagedjax.text.pooling import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from pagedjax.text.tokenizer import TOKENIZER_REMEDY, NoTokenizer, Tokenizer
from pagedjax.text.tools.use import tool_use
from pagedjax.weights.draft_model import load_draft_model
from pagedjax.weights.pretrained import DEFAULT_MODEL, LoadedModel, from_params, load_model

Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all, or one for each
# the mappings are vLLM's: {"prompt": ...}, {"prompt_token_ids": ...}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine with a tokenizer.

    Args:
        model: a path, hub id or name for `load_model`, or the result of `load_model` or
            `from_params`; None is DEFAULT_MODEL.
        params, config, tokenizer: the arguments of `from_params`, in place of `model`. With a path,
            hub id or name, `tokenizer` replaces the model's own.
        progress: show progress bars while loading and compiling.
        compilation_cache: keep compiled programs in ~/.cache/pagedjax/xla, 1.5 GiB at most, so that
            the next process starts faster. JAX's options are restored after each compilation. If
            JAX has a cache folder already (`JAX_COMPILATION_CACHE_DIR`), JAX uses that folder, and
            this option changes nothing.
        row_features: sampling options of your own (docs/design/logits-processors.md):
            `RowFeature`s, or their names, "folder/file.py:NAME". Requests set them by `extra_args`.
        engine: the fields of `EngineConfig`, by name, and the arguments of vLLM's `LLM`
            (docs/design/vllm.md). `compilation` is "background" here, where that is possible: the
            first answers come sooner, and later ones come faster. Set it to "eager" for a
            measurement. Also set it to "eager" if each run must give the same bits and these depend
            on the program of a step, as in 16 bits or on an accelerator (docs/design/start-up.md).
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
        engine_config = from_dict(EngineConfig, options, aliases=ARGUMENTS)
        check_own_values(engine_config)
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
        progress = progress and arguments.progress
        owns_params = not isinstance(model, LoadedModel)
        model = _loaded_model(
            model, params, config, tokenizer, engine_config, arguments.hub, progress
        )
        engine_config = replace(engine_config, model_family=model.family)
        linear_impl = cast("str | None", engine_config.linear_impl)  # a mapping is a name by now
        self.tokenizer = model.tokenizer
        self.engine = make_engine(
            model.model,
            engine_config,
            eos_token_ids=model.eos_token_ids,
            row_features=row_features,
            draft_model=load_draft_model(
                engine_config.speculative, model, linear_impl=linear_impl, progress=progress
            ),
            owns_params=owns_params,
            progress=progress,
        )
        # without parameters, because those of the engine may be replaced, or may sleep
        self._loaded = replace(model, model=model.model._replace(params=None))
        self._warned = False
        if progress:
            tqdm.write(programs.summary(self.startup), file=sys.stderr)
        # one session for all calls, because a step serves all of them
        self.session = Session(self.engine, model.tokenizer, model.eos_token_ids)

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold, so that a measurement starts cold. Unfinished requests
        continue.
        """
        self.engine.reset_prefix_cache()

    @property
    def params_version(self) -> int:
        """How often `update_params` has replaced the parameters. `CompletionOutput.versions` has
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
            pending: what happens to unfinished requests (docs/design/trainer-parity.md). All keep
                their tokens so far. "restart" computes their keys and values again with the new
                parameters. "keep" leaves the keys and values in the cache as they are.

        Raises:
            ValueError: requests are unfinished and `pending` is None, or a parameter differs (all
                are named). The model is unchanged.
        """
        self.engine.update_params(tree, pending)

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory: the cache, and the parameters, which move to the host (level 1)
        or are dropped (level 2).

        The prefix cache is emptied, and no program is compiled again. The parameters of a
        `LoadedModel` that was given are freed when no one else uses them. Other parameters are
        deleted, also those of `llm.model`.

        Raises:
            ValueError: requests are unfinished, the engine sleeps already, or there is no such
                level.
        """
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`. After level 2, call `update_params` too, before or after this.

        Args:
            tags: "weights" or "kv_cache" wakes up only that part; None is both.

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

        An adapter that has the name already is replaced; unfinished requests keep theirs. The
        adapter stays until it is unloaded.

        Args:
            source: the adapter's folder, or arrays of numpy or JAX, which are copied: the factors A
                [r, in] and B [out, r] by the matrix's name in transformers, as
                `pagedjax.models.initial_factors` returns them.
            options: the options of arrays, as in `pagedjax.models.adapter_parts`. A folder has its
                own.

        Raises:
            ValueError, FileNotFoundError: the engine has no adapters, the folder or the arrays do
                not fit the model, options come with a folder, or all `max_loras` slots are
                occupied. Nothing changes.
        """
        if not isinstance(source, (str, os.PathLike, Mapping)):
            raise ValueError(
                f"source is {type(source).__name__}; it must be the folder of an adapter, "
                "or a mapping of arrays (A, B) by the matrix's name"
            )
        if not isinstance(source, Mapping):
            if options is not None:
                raise ValueError(
                    f"options is {options!r:.80}, and a folder has its own in adapter_config.json; "
                    "leave options out, or give arrays"
                )
            return self._load(LoRARequest(name, lora_path=os.fspath(source)), keep=True)
        from pagedjax.weights.adapter_files import adapter_of

        request = LoRARequest(name)
        if not self.engine.config.enable_lora:
            raise no_adapters(name)
        self.engine.load_adapter(
            adapter_of(source, options or {}, self.engine.model.config, request.lora_name)
        )

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Unfinished requests continue with it.

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

    def _load_adapters(self, lora_request: Any, count: int) -> list[str | None]:
        """Load the adapters of `count` prompts, except those that are loaded already. Returns their
        names.

        Raises:
            ValueError: something else than `LoRARequest`s, a name with two folders, or as
                `load_adapter`.
        """
        if lora_request is None:
            return [None] * count
        if isinstance(lora_request, (list, tuple)):
            requests = list(lora_request)
        else:
            requests = [lora_request] * count
        if len(requests) != count:
            raise ValueError(
                f"{len(requests)} lora_request for {count} prompts; "
                "give one for all, or one for each"
            )
        by_name = _requests_by_name(requests)
        limit = self.engine.config.max_loras
        if self.engine.config.enable_lora and len(by_name) > limit:
            raise ValueError(
                f"{len(by_name)} adapters in one call, and max_loras is {limit}; "
                "raise it, or make two calls"
            )
        if by_name and not self.engine.config.enable_lora:
            raise no_adapters(next(iter(by_name)))
        for name, request in by_name.items():
            adapter = self.engine.adapters.get(name)
            is_loaded = adapter is not None and request.lora_path in ("", adapter.source)
            if request.lora_path and (request.load_inplace or not is_loaded):
                self._load(request, keep=False, needed=by_name)
        return [None if request is None else request.lora_name for request in requests]

    def start_profile(self, folder: str | os.PathLike[str] = "profile") -> None:
        """Begin a trace of what the host and the devices do, for Perfetto or XProf."""
        jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        """End the trace, and write it."""
        jax.profiler.stop_trace()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer, with `encode` and `decode`."""
        return self.tokenizer

    @property
    def model(self) -> LoadedModel:
        """The loaded model, with the parameters that the engine uses, on its devices."""
        return replace(self._loaded, model=self.engine.model)

    # several processes (docs/design/processes.md) -------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether this is a process from 1 on, whose requests come from process 0."""
        return isinstance(self.engine, FollowerEngine)

    def follow(self, **options: Any) -> None:
        """Compute this process's part of the requests to process 0, until that process calls
        `release_followers` or ends.

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
        predicted: int | Sequence[int | None] | None = None,
        service_class: str | Sequence[str] = "",
        deadline: float | Sequence[float | None] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch. Returns the outputs in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, a mapping {"prompt": ...} or
                {"prompt_token_ids": ...}, or a list of them.
            sampling_params: one for all, or one for each; None is `SamplingParams()`.
                `BeamSearchParams` beside them run in the same steps.
            priority, user: one for all, or one for each. The policy "priority" uses the priority
                (the lower number first), and "fair" and "vtc" the user.
            predicted, service_class, deadline: one for all, or one for each. "srtf" uses the
                predicted output tokens; "deadline" the class, and the seconds from now until which
                the answer should end.
            lora_request: the adapter of all prompts, or one for each.

        Raises:
            ValueError: a prompt or parameter that cannot be served. Nothing ran, and the engine is
            usable.
        """
        texts, sources = zip(*map(_text_and_source, _prompt_list(prompts)), strict=True)
        ids = [self._tokens(source) for source in sources]
        params_of_each = _params_of_each(sampling_params, len(ids))
        priorities = _values_of_each("priority", 0 if priority is None else priority, int, len(ids))
        users = _values_of_each("user", user, str, len(ids))
        predictions = _values_of_each("predicted", predicted, int, len(ids), optional=True)
        classes = _values_of_each("service_class", service_class, str, len(ids))
        deadlines = _values_of_each("deadline", deadline, float, len(ids), optional=True)
        requests = [
            GenerationRequest(
                self._last_tokens(ids[i], params),
                params,
                texts[i],
                priorities[i],
                users[i],
                predicted=predictions[i],
                service_class=classes[i],
                deadline=deadlines[i],
            )
            for i, params in enumerate(params_of_each)
        ]
        return self._run(requests, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Run a beam search for every prompt. Returns the results in vLLM's form. `generate` takes
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
        """Answer one conversation, or several. A conversation is a list of
        {"role": ..., "content": ...}.

        Args:
            tools, tool_choice, parallel_tool_calls: as in OpenAI's API (docs/design/tools.md). An
                answer's calls are its `tool_calls`, and stay in its `text` too. They are valid,
                because a grammar forbids others.
            tool_call_parser: how the model writes calls, one of `tools.formats.PARSERS`; None takes
                it from the chat template.
            lora_request: as in `generate`.

        Raises:
            ValueError: as `generate`; or a tool, the choice, or a message about calls is wrong.
        """
        use = tool_use(self.tokenizer, tools, tool_choice, parallel_tool_calls, tool_call_parser)
        ids = [use.tokens(self.tokenizer, item) for item in _conversations(messages)]
        params_of_each = [
            use.with_grammar(params, self.tokenizer)[0]
            for params in _params_of_each(sampling_params, len(ids))
        ]
        requests = []
        for tokens, params in zip(ids, params_of_each, strict=True):
            if use.tools:
                use.compiled_grammar(self.session.grammars, params)
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            requests.append(GenerationRequest(self._last_tokens(tokens, params), params, text))
        outputs = self._run(requests, use_tqdm, lora_request)
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
        (params,) = _params_of_each(sampling_params, 1)
        if isinstance(self.tokenizer, NoTokenizer):
            raise ValueError(
                "this model has no tokenizer, and a stream is text; "
                f"{TOKENIZER_REMEDY}, to generate"
            )
        cause = _cause_of_branches(params)
        if cause:
            raise ValueError(f"{cause}; a stream has one branch, use generate")
        if params.taps:
            raise ValueError("taps come with an output, and a stream is text; use generate")
        _, source = _text_and_source(prompt)
        ids = self._last_tokens(self._tokens(source), params)
        sent = 0  # characters
        with ExitStack() as stack:
            with interrupts.deferred(), self._adapter_turn(lora_request):
                (adapter,) = self._load_adapters(lora_request, 1)
                request = GenerationRequest(ids, params, adapter=adapter)
                outputs, unfinished = stack.enter_context(self.session.call([request]))
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
        """Returns one vector for each prompt: its pooled hidden states, of length 1 unless
        `normalize` is False.

        Args:
            prompts: as in `generate`.
            pooling_params: one for all, or one for each; None is `PoolingParams()`.
            lora_request: as in `generate`.

        Raises:
            ValueError: a prompt or parameter that cannot be served. Nothing ran, and the engine is
            usable.
        """
        outputs = self._pool(_prompt_list(prompts), pooling_params, "embed", use_tqdm, lora_request)
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
        """Returns hidden states after the last norm as arrays. The other arguments and the errors
        are those of `embed`.

        Args:
            pooling_task: "token_embed" gives an array [tokens, H], "embed" a pooled one [H]; None
                is the task of the parameters, or else "token_embed". Rows have length 1 unless
                `normalize` is False.
        """
        return self._pool(
            _prompt_list(prompts), pooling_params, pooling_task, use_tqdm, lora_request
        )

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
        """Returns the cosine similarity of the embeddings of two texts, for each pair.

        Args:
            text_1: one text for all of `text_2`, or one for each.
            pooling_params: as in `embed`, one for all.
            lora_request: the adapter of all texts, or one for each: those of `text_1`, then those
                of `text_2`.
        """
        texts_1 = _prompt_list(text_1)
        texts_2 = _prompt_list(text_2)
        if len(texts_1) not in (1, len(texts_2)):
            raise ValueError(
                f"text_1 has {len(texts_1)} texts and text_2 {len(texts_2)}; "
                "give one, or one for each"
            )
        texts = [*texts_1, *texts_2]
        outputs = self._pool(texts, pooling_params, "embed", use_tqdm, lora_request)
        outputs_1 = outputs[: len(texts_1)] * (len(texts_2) // len(texts_1))
        outputs_2 = outputs[len(texts_1) :]
        return [
            pooling.similarity(str(i), output_1, output_2)
            for i, (output_1, output_2) in enumerate(zip(outputs_1, outputs_2, strict=True))
        ]

    def _pool(
        self,
        prompts: list[Prompt],
        params: Any,
        task: PoolingTask | None,
        use_tqdm: bool,
        lora_request: Any = None,
    ) -> list[Any]:
        params_of_each = [
            pooling.with_task_and_pooling(
                prompt_params,
                task or prompt_params.task or "token_embed",
                self._loaded.pooling,
            )
            for prompt_params in _params_of_each(params, len(prompts), PoolingParams)
        ]
        texts, sources = zip(*map(_text_and_source, prompts), strict=True)
        limit = self.engine.config.max_model_len
        requests = []
        for text, source, prompt_params in zip(texts, sources, params_of_each, strict=True):
            ids = pooling.last_tokens(self._tokens(source), prompt_params, limit)
            requests.append(GenerationRequest(ids, prompt_params, text))
        self.warn_if_not_made_for_embeddings()
        return self._run(requests, use_tqdm, lora_request, "embedding")

    def warn_if_not_made_for_embeddings(self) -> None:
        """Warn, once, if the model's hidden states were not trained to be embeddings."""
        if self._loaded.pooling is None and not self._warned:
            self._warned = True
            warnings.warn(pooling.NO_POOLING_NAMED, UserWarning, stacklevel=4)

    # ----------------------------------------------------------------------------------------------

    def _last_tokens(self, ids: list[int], params: Params) -> Sequence[int]:
        """Returns the last tokens of a prompt, as many as `truncate_prompt_tokens` says."""
        count = params.truncate_prompt_tokens if isinstance(params, SamplingParams) else None
        if count is None:
            return ids
        return vllm_prompts.last_tokens(ids, count, self.engine.config.max_model_len)

    def _tokens(self, source: Any) -> list[int]:
        ids = self.tokenizer.encode(source) if isinstance(source, str) else _token_ids(source)
        if not ids:
            raise ValueError("the prompt is empty: it has no tokens; give it at least one")
        return ids

    def _run(
        self,
        requests: list[GenerationRequest],
        use_tqdm: bool,
        lora_request: Any,
        description: str = "generating",
    ) -> list[Any]:
        """Load the adapters, and run steps until all requests have ended. Returns the outputs."""
        with ExitStack() as stack:
            with interrupts.deferred(), self._adapter_turn(lora_request):
                adapters = self._load_adapters(lora_request, len(requests))
                requests = [
                    replace(request, adapter=adapter)
                    for request, adapter in zip(requests, adapters, strict=True)
                ]
                outputs, unfinished = stack.enter_context(self.session.call(requests))
            self._run_steps(unfinished, description, use_tqdm)
        return [
            output_of(str(i), request, branches)
            for i, (request, branches) in enumerate(zip(requests, outputs, strict=True))
        ]

    def _run_steps(self, unfinished: set[str], description: str, use_tqdm: bool) -> None:
        """Run steps until no sequence is unfinished, and show a progress bar."""
        total = len(unfinished)
        tokens = 0
        with tqdm(
            total=total, desc=description, unit="seq", disable=not use_tqdm, leave=False
        ) as bar:
            started = time.perf_counter()
            while step := self.session.step_for(unfinished):
                bar.update(total - len(unfinished) - bar.n)
                tokens += step.tokens
                rate = tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)

    def _adapter_turn(self, lora_request: Any) -> AbstractContextManager[None]:
        """Returns a turn for a call that loads adapters, so that no other thread replaces them
        before their requests are queued.
        """
        return nullcontext() if lora_request is None else self.session.turns


def _loaded_model(
    model, params, config, tokenizer, engine_config: EngineConfig, hub, progress: bool
) -> LoadedModel:
    """Returns the model that the arguments of `LLM` describe.

    Args:
        hub: arguments for the download from the hub.

    Raises:
        ValueError: arguments that do not go together.
    """
    names = ("dtype", "weight_dtype", "linear_impl", "model_family")
    model_options = {name: getattr(engine_config, name) for name in names}
    if params is not None:
        if model is not None or config is None:
            raise ValueError(
                "params come with config, what the model's config.json says, and in place of model"
            )
        model = from_params(params, config, tokenizer=tokenizer, **model_options)
    elif config is not None or (tokenizer is not None and isinstance(model, LoadedModel)):
        raise ValueError(
            "config goes with params, and tokenizer with params or a name; "
            "a loaded model has its own"
        )
    if not isinstance(model, LoadedModel):
        _prepare_kernels(engine_config)
        return load_model(
            DEFAULT_MODEL if model is None else model,
            **model_options,
            mesh=engine_config.mesh,
            devices=engine_config.devices,
            tokenizer=tokenizer,
            hub=hub,
            progress=progress,
        )
    if hub:
        raise ValueError(f"{next(iter(hub))} is of a model from the hub, and this one is loaded")
    if engine_config.model_family not in (None, model.family):
        raise ValueError(
            f"model_family is {engine_config.model_family!r}, and the loaded model's is "
            f"{model.family!r}; leave it out, or give it to load_model"
        )
    return model


def default_compilation(engine: Mapping[str, Any]) -> Compilation:
    """Returns `compilation` of an `LLM` with these options: "background" where an engine can do it,
    else "eager".
    """
    single_process = joined() is None and jax.process_count() == 1
    return "background" if single_process and not engine.get("speculative") else "eager"


def _prepare_kernels(config: EngineConfig) -> None:
    """Start the preparations that kernels need once in a process, before the model is read."""
    dtype = config.dtype or "float32"
    attention.prepare(
        config.attention_impl,
        dtype=config.kv_cache_dtype or dtype,
        query_dtype=dtype,
        invariant=config.batch_invariant,
    )
    if config.weight_dtype == AS_STORED:  # then the file says what is prepared
        return
    linear.prepare(
        cast("str | None", config.linear_impl),  # a mapping is a name by now
        dtype=dtype,
        weight_dtype=formats.find(formats.name_of(config.weight_dtype)).numbers_dtype(dtype),
        low_rank=config.enable_lora,
    )


def _features(
    row_features: Any, logits_processors: Any
) -> tuple[tuple[str, ...], tuple[RowFeature, ...]]:
    """Returns a user's own sampling options: (the names of those that are named, the others).

    Args:
        logits_processors: the same argument under vLLM's name.

    Raises:
        ValueError: both are given, or an item is neither a name nor a `RowFeature`.
    """

    def items(argument: Any) -> tuple[Any, ...]:
        return (argument,) if isinstance(argument, (str, RowFeature)) else tuple(argument)

    features = items(row_features)
    processors = items(logits_processors)
    if features and processors:
        raise ValueError(
            "logits_processors is vLLM's name of row_features, and both are given; "
            "leave one of them out"
        )
    names = []
    values = []
    for feature in features or processors:
        if isinstance(feature, str):
            names.append(feature)
        elif isinstance(feature, RowFeature):
            values.append(feature)
        else:
            raise ValueError(
                f"row_features has {feature!r:.80}; write a RowFeature, "
                "or give folder/file.py:NAME of one"
            )
    return tuple(names), tuple(values)


def _requests_by_name(requests: Iterable[Any]) -> dict[str, LoRARequest]:
    """Returns the adapters of a call, by their names.

    Raises:
        ValueError: a request that is no `LoRARequest`, or a name with two folders.
    """
    by_name: dict[str, LoRARequest] = {}
    for request in requests:
        if request is None:
            continue
        if not isinstance(request, LoRARequest):
            raise ValueError(
                f"lora_request is {request!r:.80}; it must be a LoRARequest, "
                "or a list of them and None"
            )
        first = by_name.setdefault(request.lora_name, request)
        if first.lora_path != request.lora_path:
            raise ValueError(
                f"lora_request {request.lora_name!r} has the folders {first.lora_path!r} "
                f"and {request.lora_path!r}; give each its own name"
            )
    return by_name


def _text_and_source(prompt: Any) -> tuple[str | None, Any]:
    """Returns (the text of a prompt, if it has one; the text or token ids that its tokens come
    from).
    """
    if isinstance(prompt, Mapping):
        return vllm_prompts.text_and_prompt(prompt)
    return (prompt if isinstance(prompt, str) else None), prompt


def _prompt_list(prompts: Any) -> list[Any]:
    """Returns the prompts as a list, also for a single one.

    Raises:
        ValueError: there is no prompt, or something else than prompts.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts is {prompts!r:.80}; give a string, token ids, a mapping, or a list of them"
        )
    items: list[Any] = list(prompts)
    if not items:
        raise ValueError(
            "there are no prompts; give a string, token ids, a mapping, or a list of them"
        )
    return [items] if isinstance(items[0], Integral) else items


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
    """Returns the conversations as a list, also for a single one."""
    conversations: list[Any] = list(messages) if isinstance(messages, (list, tuple)) else []
    if conversations and isinstance(conversations[0], Mapping):
        conversations = [conversations]
    if not conversations or not all(isinstance(item, (list, tuple)) for item in conversations):
        form = "[{'role': 'user', 'content': ...}, ...]"
        raise ValueError(
            f"messages is {messages!r:.80}; give a conversation, {form}, or a list of conversations"
        )
    return conversations


def _cause_of_branches(params: SamplingParams | BeamSearchParams) -> str:
    """Returns what gives a request several branches; empty if it has one."""
    if isinstance(params, BeamSearchParams):
        return "beam search"
    if params.n != 1:
        return f"n is {params.n}"
    return f"best_of is {params.best_of}" if params.drawn().n != 1 else ""


def _params_of_each(params: Any, count: int, kind: Any = Params) -> list[Any]:
    """Returns the parameters of each of `count` prompts.

    Args:
        params: one for all, or one for each; None is the default of the kind.
        kind: `Params` or `PoolingParams`.
    """
    pools = kind is PoolingParams
    default = PoolingParams if pools else SamplingParams
    if params is None or isinstance(params, kind):
        return [params or default()] * count
    items: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for item in items:
        if not isinstance(item, kind):
            name = "pooling_params" if pools else "sampling_params"
            kinds = "PoolingParams" if pools else "SamplingParams or BeamSearchParams"
            raise ValueError(f"{name} is {item!r:.80}; it must be {kinds}, or a list of them")
    if len(items) != count:
        raise ValueError(
            f"{len(items)} {default.__name__} for {count} prompts; "
            "give one for all, or one for each"
        )
    return items


def _values_of_each(
    name: str, value: Any, kind: type, count: int, *, optional: bool = False
) -> list[Any]:
    """Returns the values of an argument for each of `count` prompts.

    Args:
        name: the name of the argument.
        value: one for all, or one for each.
        optional: a value may be None.
    """
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    for item in values:
        is_number = kind is float and type(item) is int
        is_of_kind = isinstance(item, kind) and not isinstance(item, bool)
        if not (is_number or is_of_kind or (optional and item is None)):
            raise ValueError(
                f"{name} is {item!r:.80}; it must be of type {kind.__name__}, or a list of them"
            )
    if len(values) != count:
        raise ValueError(
            f"{len(values)} values of {name} for {count} prompts; give one for all, or one for each"
        )
    return values
