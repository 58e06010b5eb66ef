"""The store of one server: its data folder, database, quotas and clock."""

from __future__ import annotations

from server.settings import ServerSettings
from server.storage.clock import ExpiryClock
from server.storage.database import Database
from server.storage.folder import DataFolder
from server.storage.owners import read_salt
from server.storage.quotas import StorageQuotas


class Store:
    """Open data folder with its database, quotas and clock."""

    def __init__(self, settings: ServerSettings) -> None:
        """Open `--data-dir`. Raises `SettingsError`."""
        assert settings.data_dir is not None
        self.folder = DataFolder(settings.data_dir, settings.min_free_bytes)
        self.quotas = StorageQuotas(settings)
        self.clock = ExpiryClock()
        try:
            self.database = Database(self.folder.database)
            self.owner_salt = self.database.run_now(read_salt)
        except Exception:
            self.folder.close()
            raise

    def close(self) -> None:
        """Finish the submitted work and release the folder."""
        self.database.close()
        self.folder.close()
