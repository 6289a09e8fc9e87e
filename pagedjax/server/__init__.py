"""An OpenAI-compatible server over one engine (the extra `serve`). `pagedjax serve` starts it.

worker.py    the engine's own thread: asks in, deltas out
schema.py    what a request may say, and what it means for sampling
answers.py   what a client is told: JSON of answers, chunks and errors
app.py       the routes
metrics.py   Prometheus's view of the events
run.py       sockets, signals, the command line's options
"""
