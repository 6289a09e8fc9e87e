"""The command line: cli.py has the parser, and the commands that are short.

A module for a command of `pagedjax`, and options.py, which says how options are read.
"""
