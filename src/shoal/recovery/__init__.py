"""What outlives a process: who is in the run (`membership/`) and its state on disk (`checkpoint/`)."""
