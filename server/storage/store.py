"""The store of one server: its data folder, database, quotas and clock."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from server.settings import ServerSettings
from server.storage.clock import ExpiryClock
from server.storage.database import Database
from server.storage.folder import DataFolder
from server.storage.owners import adopt_positions, count_unattributed, read_salt
from server.storage.quotas import StorageQuotas

logger = logging.getLogger(__name__)


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

    def settle_owners(self, owners: Mapping[str, str], *, adopt: bool) -> None:
        """Assign data that earlier versions stored by position to its owner, or log a warning."""
        if adopt and (moved := self.database.run_now(adopt_positions, owners)):
            logger.info("--adopt-unnamed-key-data: %d stored objects were assigned to a key", moved)
        for position, count in self.database.run_now(count_unattributed).items():
            logger.warning(
                "%d stored objects belong to no key: an earlier version stored them for %s, an "
                "unnamed key known by its position alone. If the order of unnamed keys has not "
                "changed since, start once with --adopt-unnamed-key-data.",
                *(count, position),
            )

    def close(self) -> None:
        """Finish the submitted work and release the folder."""
        self.database.close()
        self.folder.close()
