"""The same workloads on Millstream and on the brokers people would use instead.

`python -m benchmarks` starts each broker found on this machine on loopback, drives it with its own Python
client from separate processes, and writes a table, raw figures and a plot.
"""
