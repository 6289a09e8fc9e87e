"""A load client for OpenAI-compatible servers, started by `pagedjax bench serve`.

It imports no other part of pagedjax.

bench_serve.py  the command: options, the table, the JSON
plan.py         the requests, and when they are sent
client.py       sends the requests and measures
stream.py       reads the answers
summary.py      latencies, rates and goodput, from the times of all requests
"""
