"""Arrays: the KV cache, attention, models, sampling and the jitted step. Knows no request and no
scheduler.
"""
