"""Compressors for gradients on slow links: pure tensor code, no process. One family per file, one contract for all.

Which one for what, and what each costs: docs/compression.md.
"""

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback
from shoal.collectives.compression.half import bf16, fp16
from shoal.collectives.compression.parse import COMPRESSORS, LEVELS, for_level, read_compression, read_compressor
from shoal.collectives.compression.powersgd import PowerSGD
from shoal.collectives.compression.quantize import Int4, Int8, OneBit
from shoal.collectives.compression.stats import Meter, Metered
from shoal.collectives.compression.topk import TopK

__all__ = [
    "COMPRESSORS",
    "LEVELS",
    "Compressor",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "Meter",
    "Metered",
    "OneBit",
    "PowerSGD",
    "TopK",
    "bf16",
    "for_level",
    "fp16",
    "read_compression",
    "read_compressor",
]
