"""What is known before a run is paid for: the cluster, the cost of a step, the search, the simulation."""
