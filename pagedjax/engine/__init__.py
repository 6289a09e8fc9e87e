"""The loop: schedule -> pack -> step -> commit. The only package that imports both `host` and `device`."""
