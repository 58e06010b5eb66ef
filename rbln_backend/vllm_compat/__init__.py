"""The one place where upstream names that are not public API enter the backend."""
