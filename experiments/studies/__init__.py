"""Published results, reproduced: one folder for each study, with its question, config, command,
figure and answer.

    python -m experiments.reproduce              # all of them, and REPRODUCTION.md
    python -m experiments.reproduce 003 009      # some

A study is `study.py` in its folder, with `QUESTION` and `run(folder, quick) -> Findings`. The
command writes all other files of the folder, except configs. The modules here are shared by
studies.
"""
