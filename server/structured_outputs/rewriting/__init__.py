"""From a JSON schema to a grammar whose every text satisfies it.

`rewriting.py` is the way in. A schema is read as a union of plain ones (`alternatives.py`, with
`choices.py` and `negation.py`), each of those as shapes of one JSON type (`shapes.py`; `scalars/`,
`arrays.py`, `objects.py`), and the shapes are written as rules (`rules.py`). What has no rewriting
is noted in `document.py`, with its place. Pure functions: the same schema, the same grammar.
"""
