"""An OpenAI-compatible HTTP server over one engine, started by `pagedjax serve`.

It needs the extra `serve`.

worker.py      the engine's thread: requests in, tokens out
schema.py      request bodies: fields, limits, and the sampling parameters that they mean
forms.py       forms of answers: response_format, structured_outputs, tools
responses.py   response bodies: JSON of answers and stream chunks
tool_answers.py  calls of tools in answers
streaming.py   server-sent events, and waiting that ends when the client leaves
app.py         options and routes
responses_api.py, response_items.py  POST /v1/responses
adapters.py    adapters by the field model; POST /v1/load_lora_adapter, /v1/unload_lora_adapter
vllmini.py     two routes as the engine vllmini has them: POST /generate, GET /result/{id}
errors.py      responses that are errors
middleware.py  the API key, and the size of a body
metrics.py     Prometheus metrics, from the events of the engine
continuation.py  what another engine needs to go on with an answer
relay.py       an answer that survives the engine that computes it
exchange.py    an HTTP exchange as values
supervisor.py  an engine in a process of its own, which is started again (`serve --restarts`)
ray/           several engines behind one address, on Ray Serve
serve.py       the command: sockets, signals, options of the command line
load_client/   a client that loads any OpenAI-compatible server; it imports nothing of pagedjax
"""
