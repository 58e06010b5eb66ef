"""Draft tokens: drafters that propose them, and the choice of how many a decode step checks."""
