"""Commands of `pagedjax` that are too long for cli.py, one module each."""
