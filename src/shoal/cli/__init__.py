"""The command line: one file a command, one for its text."""
