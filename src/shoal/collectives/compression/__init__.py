"""Compressors for gradients on slow links: pure tensor code, no process. One family per file, one contract for all.

Which one for what, and what each costs: docs/compression.md.
"""

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback
from shoal.collectives.compression.half import bf16, fp16
from shoal.collectives.compression.parse import (
    COMPRESSORS,
    LEVELS,
    compressor_for_level,
    parse_compression,
    parse_compressor,
)
from shoal.collectives.compression.powersgd import PowerSGD
from shoal.collectives.compression.quantize import Int4Quantizer, Int8Quantizer, OneBitQuantizer
from shoal.collectives.compression.stats import CompressionStats, MeteredCompressor
from shoal.collectives.compression.topk import TopK

__all__ = [
    "COMPRESSORS",
    "LEVELS",
    "CompressionStats",
    "Compressor",
    "ErrorFeedback",
    "Int4Quantizer",
    "Int8Quantizer",
    "MeteredCompressor",
    "OneBitQuantizer",
    "PowerSGD",
    "TopK",
    "bf16",
    "compressor_for_level",
    "fp16",
    "parse_compression",
    "parse_compressor",
]
