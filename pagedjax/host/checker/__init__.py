"""A checker of policies: all interleavings of a few requests, by the scheduler's own transitions.

    worlds.py          the small worlds: requests of a few shapes, blocks, a token budget
    moves.py           what can happen next: an arrival, a cancellation, a step and what it samples
    folding.py         which states are one state for the search
    search.py          breadth first through the states, and the graph that this leaves
    cycles.py          runs that repeat for ever, and the longest runs of a graph without them
    counterexample.py  a run that breaks a property, as events, as text and as a recording
    check.py           the properties, and `check(policy)`

docs/design/checker.md defines the properties, and says what the checker leaves out.
"""
