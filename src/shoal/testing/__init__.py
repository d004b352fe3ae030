"""For tests, ours and yours: real processes as ranks, tiny models with their data, and a watch for what is left behind.

ranks(2, lambda group: group.gather(torch.tensor([group.rank])))    one result per rank
report = shoal.train(job_for(everything), workers=2, quiet=True)
with leftovers() as left: ...                                      left: what was not there before
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
