"""Several models behind one port: a front process, and one server process per loaded model."""
