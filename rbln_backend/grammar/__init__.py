"""Grammars that guide an answer: the pinned backend, and the trial of one before it is used."""
