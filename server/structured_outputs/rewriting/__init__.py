"""Rewriting of a JSON schema to a grammar; every text of the grammar is valid against the schema.

`rewriting.py` is the entry point. A schema becomes a union of plain schemas (`alternatives.py`,
with `choices.py` and `negation.py`). Each plain schema becomes shapes of one JSON type
(`shapes.py`; `scalars/`, `arrays.py`, `objects.py`), and each shape becomes rules (`rules.py`).
`document.py` collects the parts that have no rewriting. `tags.py` rewrites structural tags. Pure
functions: equal schemas have equal grammars.
"""
