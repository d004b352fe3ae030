"""Compressors for gradients on slow links: pure tensor code. docs/compression.md compares them."""

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback
from shoal.collectives.compression.parse import COMPRESSORS, LEVELS, parse_compression, parse_compressor
from shoal.collectives.compression.stats import CompressionStats, MeteredCompressor

__all__ = [
    "COMPRESSORS",
    "LEVELS",
    "CompressionStats",
    "Compressor",
    "ErrorFeedback",
    "MeteredCompressor",
    "parse_compression",
    "parse_compressor",
]
