"""An OpenAI-compatible server over one engine (the extra `serve`). `pagedjax serve` starts it.

worker.py    the engine's own thread: asks in, deltas out
schema.py    what a request may say, and what it means for sampling
answers.py   what a client is told: JSON of answers, chunks and errors
app.py       the routes
metrics.py   Prometheus's view of the events
gate.py      the API key, and how large a body may be
refusals.py  answers that are errors
lecture.py   the two routes of vllmini
run.py       sockets, signals, the command line's options

load.py          `pagedjax bench serve`, a client for any such server: what talks
load_plan.py     what is asked, and when
load_stream.py   what is answered, read
load_summary.py  what comes of it
load_command.py  the command line
"""
