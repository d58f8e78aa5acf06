"""Pipelines that are ready to run: a file names one (`ready: archive`) and says what is to be done with what."""
