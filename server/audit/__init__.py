"""Hash-chained log of answers: its form, its files, its writer and its verification."""
