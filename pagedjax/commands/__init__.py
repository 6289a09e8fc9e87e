"""Commands of `pagedjax` that need more than a function of cli.py."""
