"""What is kept on disk: graphs and kernel libraries, their keys, locks and bundles."""
