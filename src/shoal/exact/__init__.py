"""The rules of arithmetic that every process of a run obeys: seeds, kernels, alignment, norms, digests.

Knows tensors and nothing else: no job, no plan, no process group.
"""
