"""One worker process: its context, trainer, membership and checkpointer. Does not know the driver."""
