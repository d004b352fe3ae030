"""How tensors travel between workers. Knows ranks, tensors and the lanes' tree; no job, no plan."""
