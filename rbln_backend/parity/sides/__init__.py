"""What runs in the process of a side: an engine or transformers, and looks into their layers."""
