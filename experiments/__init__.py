"""Experiments on PagedJAX: strict configs, workloads, sweeps, metrics and a report. `python -m experiments.run CONFIG`."""
