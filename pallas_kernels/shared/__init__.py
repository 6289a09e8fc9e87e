"""Code that the kernels of several operations share: one module a device or a number format.

It imports no operation.
"""
