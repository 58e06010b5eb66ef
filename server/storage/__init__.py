"""What clients leave here: one folder, one database in it, files by id beside it."""
