"""Tests of the parity runner's parts."""
