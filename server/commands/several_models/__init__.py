"""`rbln-serve serve --models FILE`: the front process and the template of its models' processes."""
