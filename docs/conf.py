"""The configuration of the documentation site: python -m sphinx -W docs build/docs

It needs no network. PAGEDJAX_SOURCE, the web address of the repository's files
(https://host/owner/name/blob/main), gives links to source files; without it they are text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import _generate  # noqa: E402
from _generate import docstrings, links, sources  # noqa: E402

from pagedjax import __version__  # noqa: E402

project = "PagedJAX"
author = "The PagedJAX authors"
copyright = author
version = release = __version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_generate", "**/.ipynb_checkpoints"]
highlight_language = "none"  # most blocks of the design notes are no program
default_role = "code"

# Markdown. Anchors of headings are GitHub's.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Tutorials are notebooks in Markdown. They run when the site is built, unless neither they nor the
# code has changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(
    ROOT
    / "build"
    / "notebooks"
    / sources.digest(ROOT / name for name in ("pagedjax", "pallas_kernels", "experiments"))
)
# of their kernels
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
nb_execution_timeout = 900  # seconds; a shared machine may be seven times slower than a quiet one
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_execution_in_temp = True  # so that a tutorial's files do not stay in docs/

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
maximum_signature_line_length = 72
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "PagedJAX"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navbar_persistent": [],  # the search field is in the sidebar
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "use_source_button": False,
}
html_copy_source = False


def generate(app: Any) -> None:
    """Before Sphinx looks for pages, because these are among them."""
    _generate.write(DOCS / "reference" / "generated")


def read_page(app: Any, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md":
        source[0] = links.outside(source[0], page, DOCS, os.environ.get("PAGEDJAX_SOURCE"))
    if name == "design/README":
        source[0] = links.with_toctree(source[0])


def read_docstring(
    app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    text = docstrings.text_of(item) if what == "class" else "\n".join(lines)
    lines[:] = docstrings.to_rst(text, docstrings.field_names(item))


def read_signature(
    app: Any, what: str, name: str, item: Any, options: Any, words: str | None, result: str | None
) -> tuple[str, str | None] | None:
    return None if words is None else (docstrings.signature(words), result)


def setup(app: Any) -> None:
    app.connect("builder-inited", generate)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
