"""Tests of the emulator's kernels."""
