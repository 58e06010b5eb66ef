"""Subclasses of vLLM's models: text models of multimodal checkpoints, and MTP layers."""
