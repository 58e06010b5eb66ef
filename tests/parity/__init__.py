"""Tests of the parity runner as a whole."""
