"""Errors that the backend raises on purpose.

Built-in second bases let callers without knowledge of this package (vLLM, argparse) handle them.
"""

from __future__ import annotations


class RblnError(Exception):
    """Base of all errors of this package."""


class ConfigError(RblnError, ValueError):
    """A setting names an unknown option or holds a value that is not allowed."""


class BucketError(RblnError, ValueError):
    """A bucket table cannot be built, or no bucket holds the requested size."""


class UnsupportedModelError(RblnError, ValueError):
    """The model, its quantisation or its layers cannot run on this device."""


class CheckpointError(RblnError, ValueError):
    """A file or download cannot be used as the requested checkpoint."""


class AdapterError(RblnError, ValueError):
    """A LoRA adapter cannot be read, does not fit the served model, or finds no free slot."""


class PlatformError(RblnError, RuntimeError):
    """A call needs this platform, and vLLM runs on another one."""


class DeviceMemoryError(RblnError, MemoryError):
    """The device has too little memory for the weights or for one KV cache block."""


class CompileError(RblnError, RuntimeError):
    """A graph could not be captured, compiled or loaded."""


class UncompiledShapeError(CompileError):
    """A step needs a shape that warm-up did not compile."""


class ArtifactError(RblnError):
    """A stored artifact cannot be used."""


class CorruptArtifactError(ArtifactError):
    """A stored artifact is damaged: missing, truncated or altered."""


class UntrustedFileError(ArtifactError, PermissionError):
    """Code to be run lies where users besides this one and root can write."""


class BundleError(ArtifactError):
    """A bundle of artifacts is malformed, too large, or not the requested one."""
