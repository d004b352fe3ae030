"""Simulates a step, servers, failures and time to accuracy on a virtual clock."""
