"""The loop: schedule -> pack -> run -> commit. Neither `host` nor `device` imports the other."""
