"""Who sends and receives: each kind of traffic is a module, each worker a process that can be killed at any time.

What a worker may forget it keeps in memory; what it may not forget is in its ledger.
"""
