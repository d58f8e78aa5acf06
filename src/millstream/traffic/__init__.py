"""Decisions about traffic, without any: who gets a message, whether it came before, how fast more may come.

Pure code: time and measurements are arguments.  What happens with the decisions is in broker/.
"""
