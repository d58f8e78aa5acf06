"""Hostile bytes for everything that reads bytes of others: each door, and what is read from files.

`make fuzz MINUTES=10` lets libFuzzer (by way of atheris) look for inputs that reach new lines; the fast suite repeats
what was found and tries a second's worth of mutations (test_fuzz.py).  `corpus/` holds inputs that reach different
lines, `found/` inputs that once did harm; both are lines of base64, and the lines of one file in `found/` belong
together.
"""
