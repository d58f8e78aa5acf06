"""Schedules, pure: which messages are still to come and when, and when something recurring happens next.

Time is an argument, nothing here touches a disk.  `log/due_index.py` keeps far due times in files, and
`broker/schedules/schedules.py` brings clock, log and journal together.
"""
