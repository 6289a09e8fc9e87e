"""A word that is nearly right is answered with the right one."""

from __future__ import annotations

import pytest

import pagedjax
from pagedjax.commands.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "there is no command 'serv'; did you mean serve?"),
        (["genrate", "a"], "there is no command 'genrate'; did you mean generate?"),
        (["qqq"], "there is no command 'qqq'; write one of generate, chat, convert, serve, replay"),
        (["bench", "server"], "there is no command 'server'; did you mean serve?"),
    ],
)
def test_an_unknown_command_suggests_the_nearest_one_or_lists_all(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    printed = capsys.readouterr()
    assert printed.err.startswith(f"pagedjax: {message}")
    assert len(printed.err.splitlines()) == 1


def test_a_shell_completes_all_public_names_and_every_one_exists():
    names = dir(pagedjax)
    assert set(pagedjax.__all__) <= set(names)
    assert {"__version__", "__doc__"} <= set(names)
    assert all(hasattr(pagedjax, name) for name in names)
