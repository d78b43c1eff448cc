"""Timing, result files and options, as the scripts here import them; they live in the package."""

from hf_multilora.bench.measure import alternate, median_ratio, milliseconds, relative_error, synchronize
from hf_multilora.bench.results import Results, arguments, clocks, environment

__all__ = [
    "Results",
    "alternate",
    "arguments",
    "clocks",
    "environment",
    "median_ratio",
    "milliseconds",
    "relative_error",
    "synchronize",
]
