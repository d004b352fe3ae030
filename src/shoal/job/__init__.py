"""What to train: the job, its data, its loss and its target."""
