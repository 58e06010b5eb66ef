"""Storage of files, batches and responses: a data folder with a database and file contents."""
