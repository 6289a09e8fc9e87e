"""What is too long for cli.py: commands of `pagedjax`, one module each, and how options are read
(options.py)."""
