"""Files, the database and owners of what is stored."""
