"""Comparisons by records: all sides, quantized forms."""
