"""Code that the kernels of several operations share: a module for each device or number format.

It imports no operation.
"""
