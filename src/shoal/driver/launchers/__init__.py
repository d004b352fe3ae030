"""Where worker processes come from. An engine starts, watches and ends them; it knows nothing of training."""
