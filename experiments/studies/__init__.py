"""Published results, reproduced: one folder for each study, with its question, config, command,
figure and answer.

    python -m experiments.reproduce              # all of them, and REPRODUCTION.md
    python -m experiments.reproduce 003 009      # two of them

A study is `study.py` in its folder, with `QUESTION` and `run(folder, quick) -> Findings`. The
command writes all other files of the folder, except configs. Studies share the modules beside these
folders.
"""
