"""The loop: schedule -> pack -> run -> commit. The only package that imports both `host` and `device`."""
