"""TLS: one context for the listener, kept up to date with the files it was made from."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.file_watch import FileWatch
from server.settings import ServerSettings, SettingsError
from server.tasks import while_running

logger = logging.getLogger(__name__)

_CLIENT_CERTIFICATES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


class Tls:
    """The TLS context of `settings`, and its renewal."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises `SettingsError` naming the file or the flag that is wrong."""
        self._settings = settings
        files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        self._watch = FileWatch([file for file in files if file is not None])
        self.context = self._build()

    @asynccontextmanager
    async def following_files(self) -> AsyncIterator[None]:
        """Take renewed certificates in for the length of the block, where that is asked for."""
        if not self._settings.enable_ssl_refresh:
            yield
            return
        async with while_running(self._watch.follow(self._renew)):
            yield

    def _build(self) -> ssl.SSLContext:
        settings = self._settings
        # The library's own idea of what is safe: TLS 1.2 and up, no weak ciphers.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.verify_mode = _CLIENT_CERTIFICATES[settings.ssl_cert_reqs]
        try:
            self._load(context)
            if settings.ssl_ciphers is not None:
                context.set_ciphers(settings.ssl_ciphers)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"TLS cannot be set up from --ssl-certfile {settings.ssl_certfile}, --ssl-keyfile "
                f"{settings.ssl_keyfile}, --ssl-ca-certs {settings.ssl_ca_certs} and --ssl-ciphers "
                f"{settings.ssl_ciphers}: {error}"
            ) from None
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        settings = self._settings
        assert settings.ssl_certfile is not None
        secret = settings.ssl_keyfile_password
        # A callable, so that OpenSSL never asks the terminal for a password that is not given.
        context.load_cert_chain(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            lambda: "" if secret is None else secret.get_secret_value(),
        )
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)

    def _renew(self) -> None:
        """Load the files into the live context, once a fresh one has shown that they fit.

        OpenSSL drops the old key as soon as it sees a certificate that does not belong to it.
        """
        try:
            self._build()
            self._load(self.context)
        except (SettingsError, OSError) as error:
            logger.error("The TLS certificate stays as it was: %s", error)
        else:
            logger.info("Loaded the TLS certificate again")
