"""Request bodies, and the sampling parameters that they mean. Names and defaults are OpenAI's and
vLLM's.

An unknown field is an error that suggests a similar name. A field that needs an unsupported feature
is an error too. Fields that change no token here (`IGNORED`) are accepted, because clients send
them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from pagedjax.options.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagedjax.text.tools.definitions import CHOICE_FORM, MAX_TOOLS

MAX_BRANCHES = 128  # of a request, as OpenAI's
# Characters of a stop string; so many of an answer may wait, and are searched at each token
MAX_STOP = 1000
MAX_FIELDS = 256  # of an object, more than any request needs
MAX_TEXT = 2**20  # characters to /tokenize, tokens to /detokenize
MAX_FIELD_TOKENS = 4096  # tokens that a field lists or biases
MAX_NAME = 256  # characters of an adapter's name
MAX_PATH = 4096  # characters of its folder


def at_most(limit: int) -> Callable[[Any], Any]:
    """A check of an object's size, before its fields are checked: each wrong field would be one
    more error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"it has {len(value)} fields; the limit is {limit}")
        return value

    return check


def plain_values(value: Any) -> Any:
    """A check of `vllm_xargs`: one error, however many values are wrong."""
    plain = (str, bool, int, float)
    at_most(MAX_FIELDS)(value)
    if not isinstance(value, dict):
        return value
    for name, item in value.items():
        elements = item if isinstance(item, list) else [item]
        too_many = len(elements) > MAX_FIELD_TOKENS
        if too_many or not all(isinstance(element, plain) for element in elements):
            raise ValueError(
                f"{name!r:.80} must be a text, a number, true, false, or a list of at most "
                f"{MAX_FIELD_TOKENS} of them"
            )
    return value


# Lists are checked up to their first error (fail_fast): a body of 8 MiB could have millions of
# errors.
Count = Annotated[int, Field(ge=0, lt=2**31)]  # the limit of the engine and its metrics
Positive = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Listed = Annotated[list[TokenId], Field(max_length=MAX_FIELD_TOKENS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=MAX_STOP)]
Strings = StopString | Annotated[list[StopString], Field(max_length=64, fail_fast=True)]
IGNORED = (
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "verbosity",
)
# Fields that SamplingParams has under the same name.
SAMPLING = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "trace_decode_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
)
BEAMS = ("length_penalty", "early_stopping")
SHARED_WITH_BEAMS = (
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
)


class Strict(BaseModel):
    # "3" is not a number, 1 is not a boolean, and numbers are finite
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _field_limit = model_validator(mode="before")(at_most(MAX_FIELDS))


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # OpenAI's padding against traffic analysis; there is none here
    include_obfuscation: bool | None = None


def refused(reason: str) -> BeforeValidator:
    """A field that asks for what does not exist here.

    `reason` is the error: why it does not exist, and what to do instead.
    """

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(reason)

    return BeforeValidator(check)


class SchemaFormat(Strict):
    name: Annotated[str, Field(max_length=MAX_STOP)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


OLD_FORM = (
    "this is the older form of structured_outputs and does not exist here; use "
    "structured_outputs: {{{}: ...}}"
)
GUIDED = {
    f"guided_{name}": OLD_FORM.format(name)
    for name in ("json", "regex", "choice", "grammar", "json_object")
}


class GenerationBody(Strict):
    """The fields that completions and chats share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(at_most(MAX_FIELD_TOKENS))] | None = (
        None
    )
    seed: int | None = None
    stop: Strings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[dict[str, Any], BeforeValidator(at_most(MAX_FIELDS))] | None = (
        None  # vLLM's
    )
    user: str | None = None  # the share of the policy "fair", if the server has --allow-user
    # fields of vLLM
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed | None = None
    allowed_token_ids: Listed | None = None
    trace_decode_token_ids: TokenIds | None = None  # the tokens of the answer
    bad_words: Strings | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    vllm_xargs: Annotated[dict[str, Any], BeforeValidator(plain_values)] | None = (
        None  # for the server's row features
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    # for policies that read them, if the server has --allow-service-fields
    predicted: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    service_class: Annotated[str, Field(max_length=256)] | None = None
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # accepted without effect, see IGNORED
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    # refused with what to do instead
    guided_json: Annotated[None, refused(GUIDED["guided_json"])] = None
    guided_regex: Annotated[None, refused(GUIDED["guided_regex"])] = None
    guided_choice: Annotated[None, refused(GUIDED["guided_choice"])] = None
    guided_grammar: Annotated[None, refused(GUIDED["guided_grammar"])] = None
    guided_json_object: Annotated[None, refused(GUIDED["guided_json_object"])] = None
    guided_whitespace_pattern: Annotated[None, refused(OLD_FORM.format("whitespace_pattern"))] = (
        None
    )
    guided_decoding_backend: Annotated[
        None, refused("there is one backend, llguidance; leave the field out")
    ] = None


def form(prompt: Any) -> str:
    """The form of a prompt, by its first element. The prompt is checked as that form only."""
    if not isinstance(prompt, list):
        return "text"
    if not prompt or isinstance(prompt[0], list):
        return "lists"
    return "texts" if isinstance(prompt[0], str) else "ids"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=4096, fail_fast=True), Tag("lists")],
    Discriminator(form),
]


def as_list(prompts: Any) -> Any:
    """`Prompts` as a list: one text or one list of ids becomes a list of it."""
    return [prompts] if form(prompts) in ("text", "ids") else prompts


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Count | None = None  # 16; 0 only echoes
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Annotated[
        None, refused("models here continue a prompt and fill no gap; leave it out")
    ] = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


OTHER_PARTS = (
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "input_file",
)


def text_parts(content: Any) -> Any:
    """A check of a content's parts: models here read text alone."""
    for part in content[:MAX_FIELDS] if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in OTHER_PARTS:
            raise ValueError(
                f"a part has the type {part['type']!r}, and models here read text alone; send its "
                "text"
            )
    return content


class Message(BaseModel):
    """One message. Other fields (`name`, `refusal`, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    _field_limit = model_validator(mode="before")(at_most(MAX_FIELDS))

    role: str
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=4096, fail_fast=True)] | None,
        BeforeValidator(text_parts),
    ] = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template: content is a text, and the role developer is system."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        return {
            **extra,
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
        }


class EmbeddingRequest(Strict):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None  # "float"
    dimensions: Positive | None = None
    user: str | None = None  # as in GenerationBody
    # fields of vLLM, and pooling_type, which vLLM has for a whole engine
    normalize: bool | None = None
    use_activation: bool | None = None
    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


def only_false(value: Any) -> Any:
    """A check of `background`."""
    if value in (None, False):
        return value
    raise ValueError(
        "an answer is made while its client waits, and is not kept; leave it out, and use stream: "
        "true"
    )


def only_text(value: Any) -> Any:
    """A check of `modalities`."""
    if value in (None, [], ["text"]):
        return value
    raise ValueError(
        "answers are text, and no other kind exists here; leave it out, or give ['text']"
    )


class ChatRequest(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None  # its older name
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # refused with what to do instead
    modalities: Annotated[list[str] | None, BeforeValidator(only_text)] = None
    audio: Annotated[
        None, refused("answers are text, and there is no audio here; leave it out")
    ] = None
    functions: Annotated[
        None, refused("this is the older form of tools and does not exist here; use tools")
    ] = None
    function_call: Annotated[
        None, refused("this is the older form of tool_choice; use tool_choice")
    ] = None
    web_search_options: Annotated[
        None, refused("this server searches no web; define a function in tools")
    ] = None


class TokenizeRequest(Strict):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TEXT, fail_fast=True)]


class LectureRequest(Strict):
    """`POST /generate`, as in vllmini: `max_length` counts the tokens of prompt and output together."""

    prompt: Annotated[str, Field(min_length=1)]
    max_length: Positive = 100


class LoadAdapterRequest(Strict):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    lora_int_id: int | None = None  # vLLM's number of it, which it ignores too


def field_values(request: BaseModel, names: Sequence[str]) -> dict[str, Any]:
    """The fields that are not null; in OpenAI's API null means absent."""
    values = {name: getattr(request, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def sampling(
    request: GenerationBody,
    max_tokens: int,
    logprobs: int | None,
    form: StructuredOutputsParams | None = None,
) -> SamplingParams | BeamSearchParams:
    """The sampling parameters of a request, whose answer has a form.

    Raises:
        ValueError: a value out of its range, or fields that exclude each other.
    """
    if request.use_beam_search:
        if form is not None:
            name = "response_format"
            if request.structured_outputs is not None:
                name = "structured_outputs"
            raise ValueError(
                f"{name} does not go with use_beam_search, whose answers have no form; leave one "
                "of them out"
            )
        return beam_search(request, max_tokens, logprobs)
    beam_fields = list(field_values(request, BEAMS))
    if beam_fields:
        raise ValueError(f"{beam_fields[0]} goes with use_beam_search: true")
    values = field_values(request, SAMPLING)
    if request.seed is not None:
        values["seed"] = request.seed % 2**32  # OpenAI's seeds are any integers
    if request.vllm_xargs is not None:
        values["extra_args"] = request.vllm_xargs
    return SamplingParams(
        **values, max_tokens=max(1, max_tokens), logprobs=logprobs, structured_outputs=form
    )


def beam_search(request: GenerationBody, max_tokens: int, logprobs: int | None) -> BeamSearchParams:
    """The parameters of a beam search; `n` is its width, as in vLLM."""
    neutral: Mapping[str, Any] = {
        "temperature": (0.0,),
        "top_p": (1.0,),
        "top_k": (0, -1),
        "best_of": (request.n,),
    }
    shared_names = (*SHARED_WITH_BEAMS, "n")
    names = [name for name in (*SAMPLING, "vllm_xargs") if name not in shared_names]
    excluded = [
        name
        for name, value in field_values(request, names).items()
        if value not in neutral.get(name, ())
    ]
    if request.stream:
        excluded.append("stream")
    elif logprobs is not None:
        excluded.append("logprobs")
    if excluded:
        raise ValueError(
            f"{excluded[0]} does not go with use_beam_search: a beam search samples nothing and comes "
            "whole"
        )
    shared = field_values(request, (*SHARED_WITH_BEAMS, *BEAMS))
    return BeamSearchParams(beam_width=request.n or 1, max_tokens=max(1, max_tokens), **shared)


# The forms of a field, for one error message; pydantic has an error for each form.
FORMS = {
    **dict.fromkeys(
        ("prompt", "input"), "a text, a list of token ids, or a list of texts or of such lists"
    ),
    "stop": "a text, or a list of texts",
    "bad_words": "a text, or a list of texts",
    "content": 'a text, or a list of {"type": "text", "text": ...}',
    "early_stopping": 'true, false or "never"',
    "tool_choice": CHOICE_FORM,
}


def first_error(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The most useful of pydantic's errors -> (message, field)."""
    unknown_fields = [error for error in errors if error["type"] == "extra_forbidden"]
    too_long = [error for error in errors if error["type"] in ("too_long", "string_too_long")]
    first = (unknown_fields or too_long or list(errors))[0]
    if first["type"] == "json_invalid":
        return (
            f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}",
            None,
        )
    path = list(map(str, first["loc"]))
    if first["loc"][0] in ("body", "query", "path"):
        del path[0]
    field = path[0][:80] if path else None
    if unknown_fields:
        bodies = (CompletionRequest, ChatRequest, EmbeddingRequest)
        names = sorted({name for body in bodies for name in body.model_fields})
        similar = difflib.get_close_matches(path[-1], names, n=1)
        message = f"unknown field {'.'.join(path)!r:.120}"
        if similar:
            message += f"; did you mean {similar[0]!r}?"
        return message, field
    text = first["msg"].removeprefix("Value error, ")
    for at, part in enumerate(path):
        checked_here = first["type"] == "value_error" and at == len(path) - 1
        if part in FORMS and first["type"] != "missing" and not checked_here:
            name = ".".join(path[: at + 1])[:120]
            return f"{name}: {text}" if too_long else f"{name} must be {FORMS[part]}", field
    return f"{'.'.join(path)[:120] or 'the body'}: {text}", field
