"""What makes the bits independent of placement: seeds, kernels, lanes and their tree, norms, digests. Pure."""
