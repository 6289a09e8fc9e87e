"""The site's generators lie beside docs/conf.py, which imports them from its own folder; so do
these tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))


@pytest.fixture(scope="session")
def build_site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A function that builds the site as its users do, with every warning an error, but runs no
    tutorial. It returns the folder of the pages. With PAGEDJAX_TESTS_SITE it is a site that is
    there already.
    """

    def build() -> Path:
        if site := os.environ.get("PAGEDJAX_TESTS_SITE"):
            return Path(site)
        pytest.importorskip("sphinx", reason="the `docs` extra is not installed")
        pages = tmp_path_factory.mktemp("site") / "pages"
        options = ["-q", "-W", "--keep-going", "-D", "nb_execution_mode=off"]
        environment = dict(os.environ)
        environment.pop("PAGEDJAX_SOURCE", None)
        child = subprocess.run(
            [sys.executable, "-m", "sphinx", *options, "docs", str(pages)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert child.returncode == 0, child.stderr
        return pages

    return build
