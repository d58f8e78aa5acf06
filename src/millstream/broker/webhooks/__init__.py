"""Webhooks at run time: one sender for all of them, a runner for each."""
