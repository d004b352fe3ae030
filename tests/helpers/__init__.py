"""What several tests share: the command, declared faults, sets of ranks, models. Typed, and seen by mypy."""
