"""Compressors for gradients on slow links: pure tensor code, no process. One family per file, one contract for all.

Which one for what, and what each costs: docs/compression.md.
"""

from shoal.collectives.compress.blocks import Int4, Int8, OneBit
from shoal.collectives.compress.contract import Compressor
from shoal.collectives.compress.feedback import ErrorFeedback
from shoal.collectives.compress.halves import bf16, fp16
from shoal.collectives.compress.meter import Meter, Metered
from shoal.collectives.compress.powersgd import PowerSGD
from shoal.collectives.compress.read import COMPRESSORS, LEVELS, for_level, read_compression, read_compressor
from shoal.collectives.compress.topk import TopK

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
