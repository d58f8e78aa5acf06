"""Spark on Millstream, against Spark on files."""
