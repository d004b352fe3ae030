"""State captured from live objects, written to disk, verified, and put back bit for bit."""
