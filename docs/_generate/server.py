"""The server's endpoints, from the OpenAPI document of the real application, and its metrics, from
their registry.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from _generate.docstrings import text_of, to_rst
from _generate.rst import definitions, inline, literal, title


class Metric(NamedTuple):
    """A metric of the registry. `needs`: the fields of EngineConfig without which it does not
    exist.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    needs: str


def openapi() -> dict[str, Any]:
    """The OpenAPI document of an application with every endpoint.

    The application is the real one. Behind it there is no model: making the routes reads the
    engine's config and the scheduler's first state, and starts nothing.
    """
    from pagedjax.host import scheduler
    from pagedjax.server.app import Options, create_app

    config = _config()
    sizes = scheduler.SchedulerConfig(
        config.block_size,
        config.num_blocks,
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_model_len,
    )
    engine = SimpleNamespace(config=config, scheduler_state=scheduler.init(sizes))
    app = create_app(
        SimpleNamespace(engine=engine, session=None),  # type: ignore[arg-type]
        Options("MODEL", allow_runtime_lora_updating=True),
    )
    return app.openapi()


def metrics() -> list[Metric]:
    """Every metric, with those of speculation and of adapters."""
    plain = {name for name, *_ in _registered()}
    with_drafts = {name for name, *_ in _registered(speculative={"method": "ngram"})}
    everything = _registered(speculative={"method": "ngram"}, enable_lora=True)

    def needs(name: str) -> str:
        return "" if name in plain else "speculative" if name in with_drafts else "enable_lora"

    return [
        Metric(name, kind, labels, text, needs(name)) for name, kind, labels, text in everything
    ]


def endpoints_page() -> list[str]:
    from pagedjax.server.app import Options
    from pagedjax.server.middleware import OPEN_PATHS

    document = openapi()
    lines = [*title("Endpoints"), *to_rst(ENDPOINTS)]
    lines += [*to_rst(f"These need no key: {', '.join(f'`{path}`' for path in OPEN_PATHS)}."), ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [*title(f"`{method.upper()} {path}`", "-"), *_operation(operation, document)]
    lines += [
        *title("The operator's choices", "-"),
        *to_rst(text_of(Options), [*Options.__dataclass_fields__]),
    ]
    return lines


ENDPOINTS = """Endpoints of `pagedjax serve`, from the OpenAPI document that a running server has at `/openapi.json`; a
browser can read it at `/docs`. Both need the key of a server that has one. Fields have the meaning that OpenAI's and
vLLM's documents give them. `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` are off unless the operator
allows them."""


def metrics_page() -> list[str]:
    from pagedjax.server import metrics as module

    lines = [*title("Metrics"), *to_rst(module.__doc__ or ""), *to_rst(METRICS)]
    return lines + definitions((literal(one.name), [_described(one)]) for one in metrics())


METRICS = """`GET /metrics` gives them in Prometheus's text format, where a counter's name ends in `_total` and a
histogram has `_bucket`, `_sum` and `_count`."""


def schema_type(schema: dict[str, Any]) -> str:
    """A JSON schema in few words: `integer | null`, `list of string`."""
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " | ".join(dict.fromkeys(schema_type(one) for one in schema[choice]))
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[-1]
    if "enum" in schema or "const" in schema:
        return " | ".join(f'"{one}"' for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {schema_type(schema.get('items', {}))}"
    return schema.get("type", "any value")


def _described(metric: Metric) -> str:
    text = f"{metric.text}. A {metric.kind}"
    names = " and ".join(f"`{label}`" for label in metric.labels)
    labels = f", with the label{'s' * (len(metric.labels) > 1)} {names}" if names else ""
    needs = f" It is there with `{metric.needs}`." if metric.needs else ""
    return inline(f"{text}{labels}.{needs}")


def _operation(operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    lines = to_rst(operation.get("description", operation["summary"]))
    for one in operation.get("parameters", []):
        lines += [f"- {literal(one['name'])} ({one['in']}, {literal(schema_type(one['schema']))})"]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "schema" in content:
        lines += _body(document["components"]["schemas"][schema_type(content["schema"])])
    return [*lines, ""]


def _body(schema: dict[str, Any]) -> list[str]:
    """The fields of a body; apart from them those that are ignored, and those that are refused with
    a hint.
    """
    from pagedjax.server.schema import IGNORED

    fields, required = schema["properties"], schema.get("required", [])
    refused = [name for name, one in fields.items() if schema_type(one) == "null"]
    ignored = [name for name in fields if name in IGNORED]
    used = [name for name in fields if name not in (*refused, *ignored)]
    lines = [f"- {_field(name, fields[name], name in required)}" for name in used]
    for what, names in (
        ("Accepted, and without an effect", ignored),
        ("Refused, with what to use instead", refused),
    ):
        lines += ["", f"{what}: {', '.join(map(literal, names))}."] if names else []
    return lines


def _field(name: str, schema: dict[str, Any], required: bool) -> str:
    ending = ", required" if required else ""
    if schema.get("default") is not None:
        ending = f", default {literal(str(schema['default']))}"
    return f"{literal(name)} ({literal(schema_type(schema))}{ending})"


def _config(**fields: Any) -> Any:
    from pagedjax.options.config import Resolved

    return Resolved(max_model_len=2048, num_blocks=128, token_buckets=(2048,), **fields)


def _registered(**fields: Any) -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name, kind, labels, text) of the metrics of an engine with these fields."""
    from pagedjax.server.metrics import Metrics

    registry = Metrics("MODEL", _config(**fields)).registry
    return [
        (one._name, one._type, tuple(one._labelnames), one._documentation)  # type: ignore[attr-defined]
        for one in registry._collector_to_names
    ]
