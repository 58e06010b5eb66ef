"""Explanations of grammars: enforced, narrowed and refused parts, and samples."""
