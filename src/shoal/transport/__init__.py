"""How bytes travel between processes, and who may send them: streams, frames, credentials. Knows no job."""
