"""JSON schemas as grammars: coverage, times and soundness, beside other libraries."""
