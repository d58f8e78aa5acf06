"""Pipelines: what is read, what is done with it and where it goes, declared in a file and run by Spark."""
