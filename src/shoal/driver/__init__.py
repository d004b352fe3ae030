"""Starts a run, watches it, replaces what is lost, and ends it."""
