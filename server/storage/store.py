"""What one server keeps: its folder, and the database in it."""

from __future__ import annotations

from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.folder import DataFolder


class Store:
    """The data folder, open; `max_bytes` are those that all that is stored may have."""

    def __init__(self, settings: ServerSettings) -> None:
        """Opens `--data-dir`. Raises `SettingsError`."""
        assert settings.data_dir is not None
        self.folder = DataFolder(settings.data_dir, settings.min_free_bytes)
        self.max_bytes = settings.max_stored_bytes
        try:
            self.database = Database(self.folder.database)
        except Exception:
            self.folder.close()
            raise

    def close(self) -> None:
        """Finish what was given to it, and let another server have it."""
        self.database.close()
        self.folder.close()
