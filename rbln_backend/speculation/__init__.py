"""Drafts of tokens that a decode step checks in one run: who makes them and how many it takes."""
