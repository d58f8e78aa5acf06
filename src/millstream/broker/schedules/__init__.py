"""Schedules at run time: logs of what is not due yet, and what is published again and again."""
