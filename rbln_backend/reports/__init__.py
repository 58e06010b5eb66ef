"""Files that engines write about themselves, and the metrics they count."""
