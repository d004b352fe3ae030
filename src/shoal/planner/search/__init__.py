"""Finds the placements that a cluster allows, ranks them by predicted time, and explains the choice. Pure."""
