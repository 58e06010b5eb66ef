"""A stand-in of the RBLN SDK: the folder ``rebel`` here is put on the import path of a test."""
