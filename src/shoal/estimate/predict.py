"""Seconds, memory and traffic of one setup, or of many at once. Deterministic; no process is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.cluster import Cluster
from shoal.estimate.prediction import Prediction
from shoal.estimate.runtime import Runtime
from shoal.estimate.setup import Setup
from shoal.estimate.work import Work


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Many at once: arrays in the order of the setups."""

    seconds: np.ndarray
    terms: Mapping[str, np.ndarray]
    peak: np.ndarray  # bytes of the worker that needs most
    binds: np.ndarray  # index into HOLDS: the largest part of that worker's memory
    binds_bytes: np.ndarray


def predict(work: Work, setup: Setup, cluster: Cluster, runtime: Runtime | None = None) -> Prediction:
    """`runtime`: SHOAL for a job (work.lanes is known), MEGATRON for a shape, unless given."""
    raise NotImplementedError


def predict_many(work: Work, setups: Sequence[Setup], cluster: Cluster, runtime: Runtime | None = None) -> Predictions:
    """The same formulas on arrays: 100,000 setups in 2 seconds."""
    raise NotImplementedError
