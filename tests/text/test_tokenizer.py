"""The embedded tokenizer against published tokens and brute force; directories; chat templates;
light imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest

from pagedjax.text.tokenizer import Tokenizer
from pagedjax.weights import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer
from tests import fresh_python
from tests.refusals import refused
from tests.weights.bpe_oracle import GPT2_WORDS, SAMPLES, BruteForce, smollm
from tests.weights.tiny import tiny_gguf, tiny_llama

ROOT = Path(__file__).parents[2]

# tokens of the published SmolLM2 tokenizer, as recorded in the tests of several projects
PUBLISHED = [
    ("Hello world", [19556, 905]),
    ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
    (
        "The quick brown fox jumps over the lazy dog",
        [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767],
    ),
    ("  leading spaces", [216, 2899, 5600]),
    ("The year 2024 had 365 days", [504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009]),
    ("def f(n):\n    return n+1\n", [1604, 275, 24, 94, 727, 472, 1003, 304, 27, 33, 198]),
    ("'s 't 're 've 'm 'll 'd", [506, 637, 100, 637, 257, 637, 307, 637, 93, 637, 764, 637, 84]),
    ("Grüße, café!", [27302, 7170, 34878, 85, 28, 37366, 17]),
    ("Hello, 世界!", [19556, 28, 216, 7906, 240, 178, 239, 230, 17]),
    ("<|im_start|>", [1]),
    ("", []),
]
# computed by hand from the definition: each digit is a token; the byte alphabet begins with "!"
BY_HAND = [
    ("2024", [34, 32, 34, 36]),
    ("7", [39]),
    ("<|im_end|>", [2]),
    ("!", [17]),
    ("a", [81]),
    ("\n", [198]),
]


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny_llama(tmp_path)))


@cache
def smollm_oracle() -> BruteForce:
    return BruteForce(dict(open_checkpoint("smollm2-135m").metadata), GPT2_WORDS, digits=True)


@pytest.mark.parametrize(("text", "ids"), PUBLISHED + BY_HAND)
def test_embedded_tokenizer_gives_the_published_tokens(text, ids):
    assert smollm().encode(text) == ids


@pytest.mark.parametrize("text", SAMPLES)
def test_embedded_tokenizer_equals_brute_force(text):
    ids = smollm().encode(text)
    assert ids == smollm_oracle().encode(text)
    assert smollm().decode(ids, skip_special_tokens=False) == text


def test_embedded_tokenizer_special_ids():
    tokenizer = smollm()
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.decode([1, 19556, 905, 2]) == "Hello world"
    assert (
        tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    )


def test_token_pieces_for_logprobs():
    assert [smollm().decode_token(i) for i in smollm().encode(" my name")] == [" my", " name"]
    assert smollm().decode_token(smollm().encode("😀")[0]) == "\ufffd"
    assert smollm().decode_token(2) == "<|im_end|>"


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenized(work):
    """Otherwise a server and its engine would wait."""
    text = "the cat and " * 50_000
    tokenizer = smollm()
    subject = text if work == "encode" else tokenizer.encode(text) * 8
    thread = threading.Thread(target=getattr(tokenizer, work), args=(subject,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.002)
        turns += 1
    assert turns > 10  # a few if the interpreter is locked; otherwise about a hundred


def test_encode_refuses_values_that_are_not_text(tiny):
    with refused("the text is a int; encode takes a string"):
        tiny.encode(3)
    with refused("half of a surrogate pair at character 1"):
        tiny.encode("a\ud800")


# --- directories ----------------------------------------------------------------------------------


def test_directory_and_gguf_give_one_tokenizer(tmp_path):
    folder = tiny_llama(tmp_path)
    from_folder, from_gguf = (
        load_tokenizer(open_checkpoint(p)) for p in (folder, tiny_gguf(tmp_path / "m.gguf", folder))
    )
    for text in SAMPLES:
        assert from_folder.encode(text) == from_gguf.encode(text)
    messages = [{"role": "user", "content": "the cat"}]
    assert from_folder.apply_chat_template(messages) == from_gguf.apply_chat_template(messages)
    assert (from_folder.eos_token_ids, from_gguf.eos_token_ids) == ((0, 2), (2,))


def test_directory_ignores_truncation_and_reads_template_files(tmp_path):
    folder = tiny_llama(tmp_path)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tools", "template": "T"},
        {"name": "default", "template": "abc"},
    ]
    config["eos_token"] = {"content": "<|im_start|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert len(tokenizer.encode("qwrtp")) == 5
    assert tokenizer.eos_token_ids == (0, 1, 2)
    hello = [{"role": "user", "content": "hello"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(hello)) == "abc"
    (folder / "chat_template.jinja").write_text("from the file")
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.decode(tokenizer.apply_chat_template(hello)) == "from the file"


def test_directories_without_a_usable_tokenizer_say_so(tmp_path):
    folder = tiny_llama(tmp_path)
    checkpoint = open_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{}")
    with refused(r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(checkpoint)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; write one with"):
        load_tokenizer(checkpoint)


# --- chat templates -------------------------------------------------------------------------------


def test_embedded_chat_template_gives_the_published_tokens():
    system = [
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    ids = smollm().apply_chat_template([{"role": "user", "content": "Hi there"}])
    assert ids == [1, *system, 2, 198, 1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198]
    without = smollm().apply_chat_template(
        [{"role": "user", "content": "Hi there"}], add_generation_prompt=False
    )
    assert without == ids[:-4]


def test_chat_template_errors_are_reported(tiny):
    with refused("must be a mapping with 'role' and 'content'"):
        tiny.apply_chat_template([{"role": "user"}])
    with refused("no chat template"):
        Tokenizer(tiny.backend, (2,), {}).apply_chat_template(
            [{"role": "user", "content": "hello"}]
        )
    with refused("at least one message"):
        tiny.apply_chat_template([])
    refusing = Tokenizer(
        tiny.backend, (2,), {"eos_token": "<|im_end|>"}, "{{ raise_exception('no ' + eos_token) }}"
    )
    with refused(r"refuses these messages: no <\|im_end\|>"):
        refusing.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("{% for call in messages[0].tool_calls %}{{ call }}{% endfor %}", 5),  # TypeError
        ("{{ messages[0].tool_calls | round }}", "x"),
        ("{{ 1 / messages[0].tool_calls }}", 0),
        ("{{ messages[0].tool_calls.items() }}", [1]),
        ("{{ '%d' % messages[0].tool_calls }}", "x"),
        ("{{ messages[0].tool_calls.pop() }}", []),  # IndexError
    ],
)
def test_messages_that_the_template_cannot_render_are_refused(tiny, template, calls):
    tokenizer = Tokenizer(tiny.backend, (2,), {}, template)
    with refused("the model's chat template refuses these messages: "):
        tokenizer.apply_chat_template([{"role": "assistant", "content": "x", "tool_calls": calls}])


# --- cost of imports ------------------------------------------------------------------------------


def test_importing_is_light():
    heavy = ("jax", "transformers", "tokenizers", "gguf", "torch", "huggingface_hub", "tqdm")
    code = f"import sys, pagedjax.text.tokenizer, pagedjax.weights; print([m for m in {heavy} if m in sys.modules])"
    assert fresh_python.output_of(code).strip() == "[]"


def test_the_embedded_tokenizer_and_template_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pagedjax.weights.tokenizer_files import load_tokenizer; from pagedjax.weights import open_checkpoint\n"
        "t = load_tokenizer(open_checkpoint('smollm2-135m'))\n"
        "print(len(t.apply_chat_template([{'role': 'user', 'content': 'Hi there'}])))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert (child.stdout.strip(), child.stderr) == ("32", "")


@pytest.mark.slow
def test_the_first_conversations_may_come_in_several_threads(tiny_folder):
    """In a new process, where transformers is not imported yet."""
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pagedjax.weights.tokenizer_files import load_tokenizer
from pagedjax.weights.locate import open_checkpoint
tokenizer = load_tokenizer(open_checkpoint(sys.argv[1]))
with ThreadPoolExecutor(8) as pool:
    asked = [{"role": "user", "content": "abc"}]
    (ids,) = set(pool.map(lambda _: tuple(tokenizer.apply_chat_template(asked)), range(8)))
"""
    fresh_python.output_of(code, tiny_folder, timeout=120)
