"""Several processes, also on several hosts, that share one engine (docs/design/processes.md).

config.py        which processes there are: options, or a launcher's variables
join.py          start JAX in all of them, and connect them
connection.py    messages
group.py         signs of life, and the end of all if one fails
watch.py         which process is late
engines.py       inputs in one order
digest.py        a hash of all inputs and transitions
difference.py    the sentence about the first input or transition that differs
"""
