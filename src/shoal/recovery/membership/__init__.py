"""Who is in a run: the pure protocol, heartbeats, and the store that they meet in."""
