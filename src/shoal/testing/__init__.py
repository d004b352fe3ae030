"""For tests of Shoal and of its users: ranks as real processes, tiny models with their data, and a check for leftovers.

ranks(2, lambda group: group.gather(torch.tensor([group.rank])))    one result per rank
report = shoal.train(job_for(everything), workers=2, quiet=True)
with leftovers() as left: ...                                      left: what the block began and did not end
"""

from shoal.driver.local_ranks import RanksFailed, ranks
from shoal.testing.leftovers import leftovers
from shoal.testing.models import (
    attention,
    batch_norm_net,
    convolution,
    cross_entropy,
    dropout_net,
    everything,
    job_for,
    samples_for,
    tied_language_model,
)

__all__ = [
    "RanksFailed",
    "attention",
    "batch_norm_net",
    "convolution",
    "cross_entropy",
    "dropout_net",
    "everything",
    "job_for",
    "leftovers",
    "ranks",
    "samples_for",
    "tied_language_model",
]
