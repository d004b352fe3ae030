"""The members of a run: the pure protocol, heartbeats, and the store."""
