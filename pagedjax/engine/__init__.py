"""The loop: schedule -> pack -> run -> commit. Neither `host` nor `device` imports the other.

session.py joins an engine with a tokenizer; processes/ is one engine in several processes.
"""
