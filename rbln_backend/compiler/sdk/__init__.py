"""What only the RBLN SDK needs of this backend, apart from the adapter that imports it."""
