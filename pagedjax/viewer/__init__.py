"""The viewer: a recorded or running engine as a page that shows each block's owner at each step.

This folder holds the page (Python and the JavaScript in assets/) and the trace export. It imports
no jax and no numpy.

viewer.page(viewer.read("run.jsonl"))       one HTML file, `pagedjax view`
viewer.page(run, second=other)              two runs of the same requests on one page
viewer.trace(viewer.read("run.jsonl"))      for Perfetto, `pagedjax trace`
viewer.live_page("viewer/steps")            the same page for a running engine; `viewer.Live` serves
                                            its steps
viewer.draw(state)                          one state of the scheduler as an SVG picture, for a
                                            notebook
"""

from __future__ import annotations

from pagedjax.viewer.document import live_page, page
from pagedjax.viewer.drawing import Drawing, draw
from pagedjax.viewer.live import Live
from pagedjax.viewer.perfetto import trace
from pagedjax.viewer.read_recording import Run, read

__all__ = ["Drawing", "Live", "Run", "draw", "live_page", "page", "read", "trace"]
