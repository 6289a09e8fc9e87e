"""The page: one HTML file with its style, its script and its data. It loads nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from pagedjax.viewer.drafts import token_list
from pagedjax.viewer.pair import pair
from pagedjax.viewer.read_recording import Run
from pagedjax.viewer.text import Decode, texts

SCRIPTS = (
    "fold",
    "lives",
    "track",
    "story",
    "look",
    "grid",
    "batch",
    "timeline",
    "panels",
    "controls",
    "live",
    "main",
)
MAX_TOKENS = 500_000  # sampled tokens that a page carries: each is 2 to 4 bytes of it
MAX_LABEL = 2_000  # characters of a prompt that a page carries


def page(
    run: Run,
    *,
    second: Run | None = None,
    labels: Mapping[str, str] | None = None,
    decode: Decode | None = None,
    opens: str = "",
) -> str:
    """Returns a recorded run as one HTML file that any browser can open.

    Args:
        second: another run of the same requests, to be shown beside the first, on one time axis.
        labels: request id -> the text of its prompt, for requests whose text is known.
        decode: token ids -> text; shows generated text, and prompts whose tokens were recorded.
        opens: the place at which the page opens if its address names none, as an address has it:
            step=14&request=r3.

    Raises:
        ValueError: no request is in both runs, or one has another prompt.
    """
    place = {"opens": opens} if opens else {}
    if second is None:
        data = _data(run, labels or {}, decode)
        return assembled(run.name or "a run", data["about"] | place, pack(data))
    runs = pair(run, second)
    data = _data(runs.first, labels or {}, decode)
    second_data = _data(runs.second, labels or {}, decode)
    data |= {"second": second_data, "parting": runs.parting, "only": runs.only}
    about = data["about"] | {"second": second_data["about"]} | place
    return assembled(f"{run.name} and {second.name}", about, pack(data))


def _data(run: Run, labels: Mapping[str, str], decode: Decode | None) -> dict[str, Any]:
    """Returns what the page shows of a run."""
    bounded_run, bare = bounded(run)
    text = texts(run.frames, run.prompts, decode) if decode and not bare else {}
    records = (record for frame in run.frames for record in frame.get("came", ()))
    labels_by_number = {
        number: labels[request_id] for number, request_id, *_ in records if request_id in labels
    }
    all_labels = {**text.get("labels", {}), **labels_by_number}
    shown_labels = {number: shortened(label) for number, label in all_labels.items()}
    prompts = run.prompts if sum(map(len, run.prompts.values())) <= MAX_TOKENS else {}
    about = {
        **facts(run.config.record(), run.policy, run.version),
        "name": run.name,
        "timed": run.timed,
    }
    about |= {"truncated": run.truncated, "bare": bare}
    return {
        "about": about,
        "frames": bounded_run.frames,
        **text,
        "prompts": prompts if text else {},
        "labels": shown_labels,
    }


def live_page(url: str = "viewer/steps", *, title: str = "live") -> str:
    """Returns the page of a running engine.

    The page requests the frames after its last one from a relative URL.

    Args:
        url: `url?since=k` returns `Live.since(k)` as JSON.
    """
    return assembled(title, {"live": url, "name": title}, "")


def bounded(run: Run) -> tuple[Run, bool]:
    """Returns (run, whether its sampled tokens are left out). They are if a page cannot carry so
    many.
    """
    tokens = sum(
        max(1, len(token_list(sampled)))
        for frame in run.frames
        for sampled in frame.get("sampled", ())
    )
    if tokens <= MAX_TOKENS:
        return run, False
    bare = tuple(
        {name: part for name, part in frame.items() if name != "sampled"} for frame in run.frames
    )
    return run._replace(frames=bare), True


def facts(config: Mapping[str, Any], policy: str, version: str) -> dict[str, Any]:
    """Returns the facts about the scheduler that the page shows."""
    return {"config": dict(config), "policy": policy, "version": version}


def shortened(text: str) -> str:
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]} …"


def pack(data: Any) -> str:
    """Returns compressed JSON in characters that HTML does not interpret.

    Equal data give equal characters.
    """
    return base64.b64encode(gzip.compress(dumps(data).encode(), mtime=0)).decode("ascii")


def dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def assembled(title: str, about: Mapping[str, Any], data: str) -> str:
    """Fills the template. `about` is readable in the file; `data` is the result of `pack`."""
    connects = "'self'" if "live" in about else "'none'"
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        connects=connects,
        style=asset("page.css"),
        script="\n".join(asset(f"{name}.js") for name in SCRIPTS),
        about=dumps(about).replace("<", "\\u003c"),  # text of a user cannot end the element
        data=data,
    )


def asset(name: str) -> str:
    return resources.files("pagedjax.viewer").joinpath("assets", name).read_text("utf-8")
