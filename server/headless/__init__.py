"""`--headless`: data-parallel engines of this host for the front end of another server."""
