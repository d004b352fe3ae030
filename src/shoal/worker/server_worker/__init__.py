"""A worker whose parameters live on parameter servers, and the process of a server."""
