"""Tests of the shape of the repository: imports, sizes, pins, documents."""
