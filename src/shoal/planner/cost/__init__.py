"""What a job costs before it runs: compute, memory, traffic, and with them the seconds of a step. Pure."""
