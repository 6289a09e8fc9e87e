"""A load client for OpenAI-compatible servers: `pagedjax bench serve`. Imports nothing else of pagedjax."""
