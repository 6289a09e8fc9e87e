"""The page: one HTML file with its style, its script and its data, and nothing from anywhere else."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from pagedjax.viewer.run import Run
from pagedjax.viewer.text import Decode, texts

SCRIPTS = ("fold", "lives", "story", "look", "grid", "batch", "timeline", "panels", "controls", "live", "main")
MAX_TOKENS = 500_000  # sampled tokens that a page carries: each is 2 to 4 bytes of it
MAX_LABEL = 2_000  # characters of a prompt that a page carries


def page(run: Run, *, labels: Mapping[str, str] | None = None, decode: Decode | None = None) -> str:
    """A recorded run as one HTML file, which opens anywhere.

    Args:
        labels: request id -> the text of its prompt, where somebody knows it.
        decode: token ids -> text; shows what was generated, and prompts whose tokens were recorded.
    """
    kept, bare = bounded(run)
    told = texts(run.frames, run.prompts, decode) if decode and not bare else {}
    given, records = labels or {}, (record for frame in run.frames for record in frame.get("came", ()))
    named = {number: given[request_id] for number, request_id, *_ in records if request_id in given}
    said = {n: shortened(text) for n, text in {**told.get("labels", {}), **named}.items()}
    prompts = run.prompts if sum(map(len, run.prompts.values())) <= MAX_TOKENS else {}
    about = {**facts(run.config._asdict(), run.policy, run.version), "name": run.name, "timed": run.timed}
    about |= {"truncated": run.truncated, "bare": bare}
    data = {"about": about, "frames": kept.frames, **told, "prompts": prompts if told else {}, "labels": said}
    return assembled(run.name or "a run", about, pack(data))


def live_page(url: str = "viewer/steps", *, title: str = "live") -> str:
    """The page of a running engine: it asks a URL, relative to its own, for the frames since the last it has.

    Args:
        url: answers `url?since=k` with `Live.since(k)` as JSON.
    """
    return assembled(title, {"live": url, "name": title}, "")


def bounded(run: Run) -> tuple[Run, bool]:
    """The run, without sampled tokens if there are too many for a page; and whether they are left out."""
    tokens = sum(len(frame.get("sampled", ())) for frame in run.frames)
    if tokens <= MAX_TOKENS:
        return run, False
    bare = tuple({name: part for name, part in frame.items() if name != "sampled"} for frame in run.frames)
    return run._replace(frames=bare), True


def facts(config: Mapping[str, Any], policy: str, version: str) -> dict[str, Any]:
    """What the page says of the scheduler's configuration."""
    return {"config": dict(config), "policy": policy, "version": version}


def shortened(text: str) -> str:
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]} …"


def pack(data: Any) -> str:
    """JSON, compressed, in letters that mean nothing in HTML. The same data give the same letters."""
    return base64.b64encode(gzip.compress(dumps(data).encode(), mtime=0)).decode("ascii")


def dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def assembled(title: str, about: Mapping[str, Any], data: str) -> str:
    """The template with everything in its place. `about` is readable in the file; `data` is what `pack` gives."""
    connects = "'self'" if "live" in about else "'none'"
    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        connects=connects,
        style=asset("page.css"),
        script="\n".join(asset(f"{name}.js") for name in SCRIPTS),
        about=dumps(about).replace("<", "\\u003c"),  # so that no text of a user ends the element
        data=data,
    )


def asset(name: str) -> str:
    return resources.files("pagedjax.viewer").joinpath("assets", name).read_text("utf-8")
