"""The command line: cli.py has the parser, and the commands that are short.

Each longer command has a module. options.py says how options are read.
"""
