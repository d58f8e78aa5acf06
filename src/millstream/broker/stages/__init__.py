"""Stages: messages that are written down now and published later, all at once and exactly once."""
