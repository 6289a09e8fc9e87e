"""Write greedy.json: what the embedded model says in float32, according to transformers on torch's
CPU. And greedy-gemma3.json: the same of Gemma 3 270M, tokens only.

    python tests/goldens/make_greedy.py                # from the repository's root; needs the `oracle` extra; ~5 minutes
    python tests/goldens/make_greedy.py gemma3-270m    # needs the `gemma` extra too

Weights come from the GGUF through our reader into transformers' model. Before anything is written,
every tensor is compared with what transformers' own GGUF loader makes of the same file, bit for
bit.

Each entry: prompt token ids; 64 tokens, each the argmax of its logits, going on past end-of-text;
the log-probability of each; and the margin, the best logit less the second. Where a margin is below
the two implementations' rounding, a different token is no error.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagedjax.weights import Checkpoint, open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer

MODEL = "smollm2-135m"
GEMMA = "gemma3-270m"
NUM_TOKENS = 64
SMALL_MARGIN = 1e-3  # of logits; a prompt with a smaller one is replaced, and the note says which
HERE = Path(__file__).resolve().parent

LONG = """The lighthouse at the end of the peninsula had been built in 1871, after three ships were lost in a single \
winter. Its keeper, a quiet man called Anders, wrote down the weather every six hours: wind, pressure, cloud, and the \
state of the sea. Nobody had asked him to do so. When he died, the village found forty-one notebooks in the cupboard \
under the stairs, each of them filled to the last line, and nobody knew what to do with them. They were kept in the \
school for a while, then in the town hall, and in the end in a cardboard box in the attic of the museum.

A hundred years later, a student of meteorology came to the island for a weekend. It rained, so she went to the \
museum, and because there was little to see she asked whether there was anything older. The woman at the desk \
remembered the box. Within an hour the student had forgotten the ferry. Here was a record without gaps, made by one \
person with one set of instruments, from a coast for which no other observations existed. She photographed the \
first notebook, page by page, and then the second.

What the notebooks showed was not what she had expected. The storms had not become more frequent, but they came \
later in the year, and the calm days in spring, which Anders always marked with a small circle, had"""

CODE = '''import math


class Circle:
    """A circle with a centre and a radius."""

    def __init__(self, x: float, y: float, radius: float):
        self.x = x
        self.y = y
        self.radius = radius

    def area(self) -> float:
        return math.pi * self.radius ** 2

    def contains(self, x: float, y: float) -> bool:
'''

# more tokens than the window of a Gemma 3 270M, 512
BEYOND_THE_WINDOW = f"{LONG}\n\n{CODE}\n\n{LONG[:1000]}"

PROMPTS: dict[str, str] = {
    "name": "Hi, my name is",
    "summer": "Today is a beautiful summer day",
    "hello there": "Hello there",
    "one token": "The",
    "newline": "\n",
    "capital": "The capital of France is",
    "water": "Water boils at a temperature of",
    "story": "Once upon a time, in a small village by the sea,",
    "recipe": "Ingredients:\n- 2 cups of flour\n- 1 teaspoon of salt\n- ",
    "list": "Three reasons to learn to play an instrument:\n\n1.",
    "letter": "Dear Sir or Madam,\n\nI am writing to",
    "definition": "Photosynthesis is the process by which",
    "dialogue": '"Where were you last night?" she asked.\n\n"',
    "counting": "1, 2, 3, 4, 5, 6, 7,",
    "arithmetic": "Q: What is 2024 - 1987?\nA:",
    "table": "| city | country | population |\n|---|---|---|\n| Paris |",
    "python": "def fibonacci(n):\n",
    "class": CODE,
    "json": '{"name": "Ada Lovelace", "born": 1815, "fields": [',
    "html": "<!DOCTYPE html>\n<html>\n  <head>\n    <title>",
    "sql": "SELECT customer_id, COUNT(*) FROM orders",
    "french": "La meilleure façon d'apprendre une langue est",
    "german": "Der schnellste Weg nach Hause ist",
    "chinese": "今天天气很好，我们",  # noqa: RUF001
    "emoji": "I love pizza 🍕 and ice cream 🍦 because",
    "spaces": "a\tb\n    indented    text   with  gaps",
    "special": "First document.<|endoftext|>Second document:",
    "long": LONG,
}
CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "What is gravity?"}],
    "chat with system": [
        {"role": "system", "content": "You are a pirate. Answer in one sentence."},
        {"role": "user", "content": "How old is the Earth?"},
    ],
    "chat turns": [
        {"role": "user", "content": "Give me a word that rhymes with 'cat'."},
        {"role": "assistant", "content": "Hat."},
        {"role": "user", "content": "And another one, with a short example sentence."},
    ],
}
TOP5 = ("name", "python", "chat")  # entries that also record the five best tokens of every step
# entries that also record the prompt tokens' log-probabilities
PROMPT_LOGPROBS = ("summer", "class", "chinese")


def load_model(checkpoint: Checkpoint) -> Any:
    """transformers' model in float32 with our reader's tensors, plain attention."""
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    state = {name: torch.from_numpy(tensor.read()) for name, tensor in checkpoint.tensors.items()}
    if checkpoint.config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def compare_with_transformers(checkpoint: Checkpoint) -> int:
    """Assert that transformers' GGUF loader reads the same values; returns how many tensors were
    compared.
    """
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
    ).state_dict()
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.read(), reference[name].numpy(), err_msg=name)
    assert set(reference) - set(checkpoint.tensors) <= {"lm_head.weight"}
    return len(checkpoint.tensors)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """`num_tokens` tokens by argmax with transformers' KV cache, never stopping; log-probabilities
    from float64.
    """
    out: dict[str, Any] = {"token_ids": [], "logprobs": [], "margins": [], "top5": []}
    ids = torch.tensor([prompt])
    cache = None
    for step in range(num_tokens):
        result = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        logits = result.logits[0, -1].double()
        logprobs = logits.log_softmax(-1)
        best = logits.topk(5)
        if step == 0:
            out["prompt_logprobs"] = prompt_logprobs(result.logits[0], prompt)
        out["token_ids"].append(int(best.indices[0]))
        out["logprobs"].append(round(float(logprobs[best.indices[0]]), 5))
        out["margins"].append(round(float(best.values[0] - best.values[1]), 5))
        out["top5"].append([[int(i), round(float(logprobs[i]), 5)] for i in best.indices])
        ids = best.indices[:1][None]
    return out


def prompt_logprobs(logits: torch.Tensor, prompt: list[int]) -> list[float | None]:
    """log p(token | the tokens before it) for each prompt token; None for the first."""
    logprobs = logits.double().log_softmax(-1)
    return [None, *(round(float(logprobs[i, token]), 5) for i, token in enumerate(prompt[1:]))]


def entries(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Return the token ids of each prompt, by name."""
    tokenizer = load_tokenizer(checkpoint)
    texts = {name: tokenizer.encode(text) for name, text in PROMPTS.items()}
    return texts | {
        name: tokenizer.apply_chat_template(messages) for name, messages in CHATS.items()
    }


def write_gemma() -> None:
    """Write greedy-gemma3.json: of each prompt its text, its tokens, and 64 tokens."""
    checkpoint = open_checkpoint(GEMMA)
    compared = compare_with_transformers(checkpoint)
    model = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    records = []
    for name, text in (PROMPTS | {"beyond the window": BEYOND_THE_WINDOW}).items():
        prompt = tokenizer.encode(text)
        record = greedy(model, prompt, NUM_TOKENS)
        margin = min(record["margins"])
        print(f"{name}: {len(prompt)} tokens, least margin {margin}")
        if margin > SMALL_MARGIN:
            records.append(
                {"name": name, "text": text, "prompt_token_ids": prompt}
                | {"min_margin": margin, "token_ids": record["token_ids"]}
            )
    note = (
        "Greedy continuations of Gemma 3 270M (Q4_K_M, widened to float32). End-of-text does not "
        f"stop them. Prompts whose least margin is under {SMALL_MARGIN} are left out."
    )
    write(HERE / "greedy-gemma3.json", note, checkpoint, GEMMA, compared, records)


def main() -> None:
    torch.set_num_threads(1)  # one order of summation
    if sys.argv[1:] == [GEMMA]:
        write_gemma()
        return
    checkpoint = open_checkpoint(MODEL)
    compared = compare_with_transformers(checkpoint)
    model = load_model(checkpoint)
    records = []
    for name, prompt in entries(checkpoint).items():
        record = greedy(model, prompt, NUM_TOKENS)
        if name not in TOP5:
            del record["top5"]
        if name not in PROMPT_LOGPROBS:
            del record["prompt_logprobs"]
        smallest = min(record["margins"])
        source = {"text": PROMPTS[name]} if name in PROMPTS else {"messages": CHATS[name]}
        records.append(
            {"name": name, **source, "prompt_token_ids": prompt, "min_margin": smallest, **record}
        )
        print(
            f"{name}: {len(prompt)} tokens, least margin {smallest}{' TOO SMALL' if smallest < SMALL_MARGIN else ''}"
        )
    write(HERE / "greedy.json", NOTE, checkpoint, MODEL, compared, records)


def write(
    path: Path,
    note: str,
    checkpoint: Checkpoint,
    model: str,
    compared: int,
    records: list[dict[str, Any]],
) -> None:
    """Write the records, one a line, below where they are from.

    Args:
        compared: how many tensors were compared with those of transformers.
    """
    header = {
        "note": note,
        "command": " ".join(["python tests/goldens/make_greedy.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "model": model,
        "sha256": hashlib.sha256(checkpoint.path.read_bytes()).hexdigest(),
        "dtype": "float32",
        "tensors_equal_to_transformers": compared,
    }
    lines = ",\n".join(
        json.dumps(record, ensure_ascii=False, separators=(",", ":")) for record in records
    )
    text = (
        json.dumps(header, ensure_ascii=False, indent=1)[:-2]
        + ',\n "prompts": [\n'
        + lines
        + "\n]}\n"
    )
    path.write_text(text, encoding="utf-8")


NOTE = (
    "Greedy continuations of the embedded model in float32, the reference for every implementation here. "
    "End-of-text does not stop them. margins: best logit less the second; where one is below the rounding of the "
    "implementations compared, another token is no error. One prompt was replaced since its least margin was under "
    "1e-3: french was 'Il était une fois une petite fille qui' (0.00064)."
)

if __name__ == "__main__":
    main()
