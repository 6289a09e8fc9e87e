"""The parts of the command line that are too long for cli.py.

A module for a command of `pagedjax`, and options.py, which says how options are read.
"""
