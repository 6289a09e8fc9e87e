"""The parts of every experiment: config, workload, engine, driver, metrics, and the folders of
results.

A module belongs here if the commands (run, compare, capacity, report) or the studies need it. It
imports no command.
"""
