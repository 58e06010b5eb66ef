"""On-disk store of graphs and kernel libraries, with their keys, locks and bundles."""
