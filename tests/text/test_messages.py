"""What a chat template gets of a message: text, whatever form a client sends it in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import strategies as st

from pagedjax.text.messages import content_text
from pagedjax.text.tokenizer import Tokenizer
from tests import drawn
from tests.refusals import refused

PRINTS = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}|{{ m.tool_calls is defined }};{% endfor %}"
)
TRIMS = "{% for m in messages %}{{ m.role }}={{ m.content | trim }}|{{ m.tool_calls is defined }};{% endfor %}"
PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]


@pytest.mark.parametrize("template", [PRINTS, TRIMS])
@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "the cat"}, "user=the cat|False;"),
        ({"role": "user", "content": ""}, "user=|False;"),
        ({"role": "user", "content": None}, "user=|False;"),
        ({"role": "user", "content": PARTS}, "user=the cat|False;"),
        ({"role": "user", "content": []}, "user=|False;"),
        ({"role": "user", "content": None, "tool_calls": None, "name": None}, "user=|False;"),
        ({"role": "assistant", "tool_calls": []}, None),
    ],
)
def test_a_template_gets_text(tiny, template, message, text):
    tokenizer = Tokenizer(tiny.tokenizer.backend, (2,), {}, template)
    if text is None:
        with refused("must be a mapping with 'role' and 'content'"):
            tokenizer.apply_chat_template([message])
    else:
        assert tokenizer.decode(tokenizer.apply_chat_template([message])) == text


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (3, "messages.0.content is 3; it must be a text, or a list of parts of text"),
        (False, "messages.0.content is False; it must be a text"),
        (
            {"type": "text", "text": "x"},
            "messages.0.content is {'type': 'text', 'text': 'x'}; it must be a text",
        ),
        (b"x", "messages.0.content is b'x'; it must be a text"),
        (["x"], "messages.0.content.0 is 'x'; a part is {'type': 'text', 'text': ...}"),
        ([None], "messages.0.content.0 is None; a part is"),
        (
            [*PARTS, {"type": "image_url"}],
            "messages.0.content.2 has the type 'image_url', and models here read text",
        ),
        (
            [{"text": "x"}],
            "messages.0.content.0 has the type None, and models here read text alone",
        ),
        ([{"type": "text"}], "messages.0.content.0.text is None; it must be a text"),
        ([{"type": "text", "text": 3}], "messages.0.content.0.text is 3; it must be a text"),
    ],
)
def test_another_content_is_refused_with_its_place(tiny, tiny_llm, content, error):
    for call in (tiny_llm.chat, tiny.tokenizer.apply_chat_template):
        with refused(re.escape(error)):
            call([{"role": "user", "content": content}])
    with refused(r"messages\.0\.role is 3; it must be a text"):
        tiny.tokenizer.apply_chat_template([{"role": 3, "content": "x"}])


def test_parts_of_other_apis_are_text_too():
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert content_text("input.0", tuple(parts)) == "ab"


@drawn.examples(60, 2_000)
def test_any_conversation_is_rendered_as_by_transformers(tiny, number):
    """transformers gets the text of each content; here the contents may be parts, or nothing."""
    transformers = pytest.importorskip("transformers")
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}\n{{ m['content'] | trim }}"
        "{% if m.name is defined %}({{ m.name }}){% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    backend = tiny.tokenizer.backend
    tokenizer = Tokenizer(backend, (2,), {}, template)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    text = st.text(max_size=8)
    parts = st.lists(text, max_size=3)
    messages = st.tuples(
        st.sampled_from(["user", "assistant", "system"]), st.none() | text | parts, st.none() | text
    )

    def holds(conversation: list[Any], generating: bool) -> None:
        chat = []
        plain = []
        for role, content, name in conversation:
            joined = "".join(content or ()) if isinstance(content, list) else content or ""
            sent = (
                [{"type": "text", "text": part} for part in content]
                if isinstance(content, list)
                else content
            )
            chat.append({"role": role, "content": sent, "name": name})
            plain.append(
                {"role": role, "content": joined} | ({} if name is None else {"name": name})
            )
        tokens = tokenizer.apply_chat_template(chat, generating)
        rendered = theirs.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=generating
        )
        assert tokens == tokenizer.encode(rendered, add_special_tokens=False)

    drawn.check(number, holds, st.lists(messages, min_size=1, max_size=4), st.booleans())
