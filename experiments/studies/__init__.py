"""Published results, reproduced: one folder a study, with its question, config, command, figure and answer.

    python -m experiments.reproduce              # all of them, and REPRODUCTION.md
    python -m experiments.reproduce 003 009      # some

A study is `study.py` in its folder, with `QUESTION` and `run(folder, quick) -> Findings`; everything else in the
folder but its configs is written by the command.
"""
