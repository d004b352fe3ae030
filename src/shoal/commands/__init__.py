"""The commands that know before they pay; each file declares one and calls what does the work."""
