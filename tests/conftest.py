"""Models and a browser that several tests share, compilations that are kept between runs in
.cache/, and room for them in a process of thousands of tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import drawn, garbage, mappings, memory, quick_compiler, workers

# Read when jax is first imported, here and in the processes that tests start. Without it the suite
# takes minutes more.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Ray lowers the priority of its workers by 15. Beside the tests of other processes, replicas would
# hardly get a CPU, and miss their time limits.
os.environ.setdefault("RAY_worker_niceness", "0")
# Of glibc: threads of XLA would have memory of their own each, and give none of it back.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# Most tests are not about the passes of LLVM, which take two seconds for each variant of a CPU
# kernel.
os.environ.setdefault("PALLAS_KERNELS_CPU_PASSES", "few")
# Engines on a mesh need several devices. The first one is the default, as before.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
quick_compiler.choose_emitters()


def pytest_addoption(parser: pytest.Parser) -> None:
    workers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    drawn.choose_settings(config.option.markexpr)
    if config.option.seconds is not None:
        config.pluginmanager.register(workers.Deadline(config.option.seconds))
    garbage.start()


@pytest.hookimpl(tryfirst=True)  # before xdist tells which tests there are
def pytest_collection_finish(session: pytest.Session) -> None:
    workers.sort(session.items, session.config.option.drawn_order)
    garbage.set_aside()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> workers.ByFile | None:
    if config.getvalue("dist") != "loadfile":  # somebody asks for another distribution
        return None
    return workers.ByFile(config, log)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as at a terminal, for this process and those that it starts: what a shell runs in the
    background ignores SIGINT.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that the mark `default_cases` does not name are slow: most cost the compilation of an
    engine. If the mark `slow_cases` names some, all others are exhaustive.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        default = item.get_closest_marker("default_cases")
        slow = item.get_closest_marker("slow_cases")
        if default is None and slow is None:
            continue
        case = item.callspec.id  # type: ignore[attr-defined]
        default_cases = default.args if default else ()
        named = {*default_cases, *(slow.args if slow else ())}
        function = item.nodeid.removesuffix(f"[{case}]")
        missing.setdefault(function, named)
        missing[function].discard(case)
        if case not in default_cases:
            item.add_marker("slow" if slow is None or case in slow.args else "exhaustive")
    # a command that names single tests has not all cases of a function
    has_cases = bool(items) and "[" in items[0].nodeid
    are_selected = has_cases and any("::" in argument for argument in items[0].config.args)
    if not are_selected and (wrong := {name: cases for name, cases in missing.items() if cases}):
        raise pytest.UsageError(
            f"default_cases or slow_cases names cases that do not exist: {wrong}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """All tests of a module, and its fixtures, have programs of one kind. Those of a real model
    must run fast.
    """
    optimised = "smollm2" in item.fixturenames or item.get_closest_marker("optimised") is not None  # type: ignore
    all_programs = item.get_closest_marker("few_optimisations") is not None
    quick_compiler.choose(not optimised, all_programs)
    garbage.collect_now_and_then()
    return (yield)  # type: ignore[return-value]


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs() -> Iterator[None]:
    """JAX keeps the program of each operation and shape that any test used, and FastAPI the engine
    of each server. After thousands of tests they have all the memory mappings that Linux allows a
    process, and compiling the next engine is a segmentation fault. Engines of fixtures keep their
    programs."""
    yield
    if "jax" in sys.modules and (mappings.used() > mappings.limit() // 2 or memory.grown()):
        sys.modules["jax"].clear_caches()
        mappings.forget_applications()
        memory.give_back()


@pytest.fixture(scope="session")
def documented_file(tmp_path_factory) -> Callable[[str, str], Path]:
    """A function that writes the file of a given name that a page of docs/design shows, and returns
    its path.
    """

    def write(page: str, name: str) -> Path:
        text = (Path(__file__).parents[1] / "docs" / "design" / page).read_text("utf-8")
        (code,) = re.findall(rf"```python\n(# {re.escape(name)}.*?)```", text, re.DOTALL)
        path = tmp_path_factory.mktemp("documented") / name
        path.write_text(code, "utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random Llama of two layers with 320 tokens and room for 512, as a Hugging Face
    directory.
    """
    from tests.weights.tiny import tiny_llama

    # untied: with random tied embeddings a model repeats its last token, and most tests would see
    # nothing
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", tied=False)


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """Its parameters are as they are stored, so that tests can change them; engines pack them."""
    from pagedjax import load_model

    return load_model(tiny_folder, linear_impl="xla")


@pytest.fixture(scope="session")
def one_layer_folder(tmp_path_factory) -> Path:
    """The model of `tiny_folder` with one layer, which is compiled faster.

    It is not for tests of what the cache holds: keys and values of the first layer depend on their
    token and its place alone, so a block of another context would do as well.
    """
    from tests.weights.tiny import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("one_layer") / "llama", layers=1, tied=False)


@pytest.fixture(scope="session")
def one_layer(one_layer_folder):
    """Its parameters are as they are stored, as those of `tiny`."""
    from pagedjax import load_model

    return load_model(one_layer_folder, linear_impl="xla")


@pytest.fixture(autouse=True)
def _no_cached_prompts(request: pytest.FixtureRequest) -> None:
    """A test finds no block that another one cached, in whatever order they run."""
    if "tiny_llm" in request.fixturenames:
        request.getfixturevalue("tiny_llm").reset_prefix_cache()


@pytest.fixture(scope="session")
def tiny_llm(tiny):
    """For tests that leave no request behind. Its prefix cache is empty when a test begins."""
    from pagedjax import LLM

    return LLM(
        tiny,
        progress=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        token_buckets=(8, 64),
        num_blocks=256,
    )


@pytest.fixture(scope="session")
def tiny_long(tmp_path_factory):
    """The same with room for 4,096 tokens: descriptions of tools are long in a vocabulary of
    bytes.
    """
    from pagedjax import load_model
    from tests.weights.tiny import tiny_llama

    return load_model(
        tiny_llama(tmp_path_factory.mktemp("long") / "llama", tied=False, max_len=4096),
        linear_impl="xla",
    )


@pytest.fixture(scope="session")
def tiny_tools(tiny_long):
    """An engine for tests of tools."""
    from pagedjax import LLM

    return LLM(
        tiny_long,
        progress=False,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        token_buckets=(8, 256),
        num_blocks=512,
    )


@pytest.fixture(scope="module")
def smollm2():
    """The embedded model in float32: 0.5 GB, which few modules need."""
    from pagedjax import load_model

    return load_model("smollm2-135m", dtype="float32")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium, for tests marked `browser`."""
    api = pytest.importorskip("playwright.sync_api", reason="the `browser` extra is not installed")
    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if binary is None:
        pytest.skip("there is no Chromium on this machine; install the system's package `chromium`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()
