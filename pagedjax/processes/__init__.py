"""Several processes, also on several hosts, that share one engine (docs/design/processes.md).

config.py        which processes there are: options, or a launcher's variables
join.py          start JAX in all of them, and connect them
group.py         signs of life, and the end of all if one fails
engines.py       inputs in one order, and a digest that finds the first difference
"""
