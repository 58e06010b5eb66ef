"""The compile cache as one portable file: graphs and kernel libraries, packed and unpacked."""
