"""Authentication by API keys and admin keys, and the exception for programs on this host.

Only digests of keys are stored. Invariants: a request is authorized by its head alone, before its
body is read; every configured key is compared in constant time; a key file that cannot be read
completely, or holds no key, changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr
from starlette.types import Scope as AsgiScope

from server.admission import NO_LIMITS, KeyLimits
from server.errors import AuthenticationError, PermissionDeniedError
from server.host.files import FileWatch, read_regular
from server.host.tasks import background_task, in_thread
from server.request.endpoints import NEVER_GUARDED, Route, Scope, get_scope
from server.request.options import EVERY_TIER, Tier, Tiers, get_tiers
from server.request.record import Caller
from server.settings import ServerSettings, SettingsError
from server.storage.database import NO_KEY, owner_of_digest

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,63})(?:\[([a-z0-9.:+-]+)\])?")
"""A name, and the tiers and limits of its key where there are some: `nightly[flex+rpm:60]`."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{23,}=")
_DIGEST = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}")
_BEARER = b"bearer "
_KEY_HEADERS = (b"x-api-key", b"api-key")
_MAX_CANDIDATES = 3
"""A request sends its key in one header; a client may send it in all three."""
_MAX_FILE_BYTES = 1024 * 1024
_CHANGES = (Scope.ADAPTERS, Scope.ADMIN)
_UNGUARDED = (
    "This needs an admin key (--admin-key). Without one it is open to programs on the server's own "
    "host alone, not through a proxy, and where --host is a loopback address; "
    "--allow-unguarded-changes opens more."
)
_LOCAL = ("127.", "::1", "::ffff:127.")
_PROXY_HEADERS = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"via", b"origin", b"sec-fetch-site")
"""Prefixes of headers that show that a proxy or a page in a browser sent the request."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its name in metrics and logs, its SHA-256 and the owner of its data.

    `tiers` are those that it may use; `limits` are those of all keys of its owner.
    """

    name: str
    digest: bytes
    owner: str
    limits: KeyLimits
    tiers: Tiers = EVERY_TIER


class KeyRing:
    """The keys of one kind: those of the settings, and those of a file that is reloaded."""

    def __init__(
        self,
        kind: str,
        secrets: Sequence[SecretStr],
        file: Path | None,
        salt: bytes,
        limits: KeyLimits,
    ) -> None:
        """Parse keys; unnamed ones are called `kind-N`, and `salt` hashes their owners.

        `limits` apply to keys that name no others. Raises `SettingsError` when the file is invalid.
        """
        self._given = [
            _key(secret.get_secret_value(), kind, number, salt, limits)
            for number, secret in enumerate(secrets, 1)
        ]
        self._file = file
        self._limits = limits
        self._watch = FileWatch([file] if file is not None else [])
        self.keys = [*self._given, *self._read_file()]

    def find(self, digests: Iterable[bytes]) -> Key | None:
        match: Key | None = None
        for digest in digests:
            for key in self.keys:
                if hmac.compare_digest(key.digest, digest):
                    match = key
        return match

    def get_key_name(self, owner: str) -> str | None:
        return next((key.name for key in self.keys if key.owner == owner), None)

    def limits(self) -> dict[str, KeyLimits]:
        """Return the limits by owner; the first key wins where two have one owner."""
        return {key.owner: key.limits for key in reversed(self.keys)}

    async def follow(self) -> None:
        """Reload the key file whenever it changes; never returns."""
        if self._file is not None:
            await self._watch.follow(self._reload)

    async def _reload(self) -> None:
        try:
            self.keys = [*self._given, *await in_thread(self._read_file)]
        except SettingsError as error:
            logger.error("Kept the previous keys: %s", error)
        else:
            logger.info("Reloaded %s: %d keys", self._file, len(self.keys))

    def _read_file(self) -> list[Key]:
        if self._file is None:
            return []
        try:
            text = read_regular(self._file, _MAX_FILE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"key file {self._file} cannot be read: {error}") from None
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        keys = [
            _key_of_line(self._file, number, line, self._limits)
            for number, line in lines
            if line and not line.startswith("#")
        ]
        if not keys:
            raise SettingsError(f"key file {self._file} holds no key; remove the flag to have none")
        return keys


class Access:
    """Authorizes requests by their head."""

    def __init__(self, settings: ServerSettings, salt: bytes = b"") -> None:
        """Load the keys; `salt` hashes owners. Raises `SettingsError` for an invalid key file."""
        limits = KeyLimits(
            settings.key_max_in_flight,
            settings.key_requests_per_minute,
            settings.key_tokens_per_minute,
        )
        self._api = KeyRing("api", settings.api_key, settings.api_key_file, salt, limits)
        # Operators' keys have the limits that they name.
        self._admin = KeyRing("admin", settings.admin_key, settings.admin_key_file, salt, NO_LIMITS)
        self._open_metrics = settings.open_metrics
        self._unguarded = settings.allow_unguarded_changes
        self._listens_locally = settings.listens_locally
        self._on_socket = settings.uds is not None

    @asynccontextmanager
    async def following_files(self) -> AsyncIterator[None]:
        """Reload changed key files while the block runs."""
        async with background_task(self._api.follow()), background_task(self._admin.follow()):
            yield

    def admit(self, route: Route, scope: AsgiScope) -> Caller:
        """Return the caller of a request.

        Raises `AuthenticationError` for a missing or unknown key, `PermissionDeniedError` for a key
        or a client address that may not use the route.
        """
        needed = get_scope(route, scope["method"])
        if needed in NEVER_GUARDED:
            return Caller(None, is_admin=False)
        keys: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
                keys.append(value[len(_BEARER) :].strip())
            elif name in _KEY_HEADERS:
                keys.append(value.strip())
        sent = [key for key in keys if key][:_MAX_CANDIDATES]
        digests = [hashlib.sha256(key).digest() for key in sent]
        admin = self._admin.find(digests) if self._admin.keys else None
        if admin is not None:
            return Caller(admin.name, True, admin.tiers, admin.owner, admin.limits)
        api = self._api.find(digests) if self._api.keys else None
        client = scope.get("client")
        # Clients of a Unix socket have no address; its mode admits this user alone.
        near = self._on_socket if client is None else str(client[0]).startswith(_LOCAL)
        # And no header shows a proxy or a browser.
        local = near and not any(name.startswith(_PROXY_HEADERS) for name, _ in scope["headers"])
        trusted = not self._admin.keys and self._listens_locally and local
        caller = Caller(None, trusted)
        if api is not None:
            caller = Caller(api.name, trusted, api.tiers, api.owner, api.limits)
        is_open = needed is Scope.ADMIN or (needed is Scope.METRICS and self._open_metrics)
        needs_admin = needed in _CHANGES and bool(self._admin.keys)
        if api is None and (needs_admin or (self._api.keys and not is_open)):
            message = "An API key is needed: send it as `Authorization: Bearer KEY`."
            if digests:
                message = "The API key is not valid."
            raise AuthenticationError(message, headers={"www-authenticate": "Bearer"})
        if needed in _CHANGES and not caller.is_admin:
            if self._admin.keys:
                raise PermissionDeniedError("This needs an admin key.")
            if not self._unguarded or (needed is Scope.ADMIN and not local):
                raise PermissionDeniedError(_UNGUARDED)
        return caller

    def get_key_name(self, owner: str) -> str | None:
        """Return the key name that metrics show for an owner, None for the owner without a key."""
        if owner == NO_KEY:
            return None
        name = self._api.get_key_name(owner) or self._admin.get_key_name(owner)
        # The owner of a named key is its name, which contains no colon.
        return name or ("removed" if ":" in owner else owner)

    def weights(self) -> Mapping[str, float]:
        """Return the weights of the API keys by owner."""
        return {owner: limits.weight for owner, limits in self._api.limits().items()}

    def get_limits(self, owner: str) -> KeyLimits:
        """Return the limits of an owner's keys; none for an owner without a key."""
        return (self._admin.limits() | self._api.limits()).get(owner, NO_LIMITS)


def _key(text: str, kind: str, number: int, salt: bytes, limits: KeyLimits) -> Key:
    """Parse `KEY` or `name=KEY`; base64 that ends in `=` is a key without a name."""
    text = text.strip()
    name, equals, rest = text.partition("=")
    named = _NAMED.fullmatch(name)
    is_base64 = len(text) % 4 == 0 and bool(_BASE64.fullmatch(text)) and text != text.lower()
    if equals and not rest.startswith("=") and named is not None and not is_base64:
        where = f"--{kind}-key (RBLN_SERVE_{kind.upper()}_KEY)"
        if not rest:
            raise SettingsError(f"{where}: the key of the name {name!r} is empty")
        return _named_key(where, named, _digest(rest), limits)
    digest = _digest(text)
    return Key(f"{kind}-{number}", digest, owner_of_digest(salt, digest), limits)


def _key_of_line(file: Path, number: int, line: str, limits: KeyLimits) -> Key:
    name, _, rest = line.partition("=")
    named = _NAMED.fullmatch(name)
    if not rest or named is None:
        raise SettingsError(
            f"key file {file}, line {number}: write `name=key` or `name=sha256:<64 hex digits>`, "
            "the name of letters, digits and `._-`, optionally followed by tiers and limits such "
            "as `[flex+rpm:60]`"
        )
    if rest.startswith(_DIGEST) and not _HEX.fullmatch(rest.removeprefix(_DIGEST).lower()):
        raise SettingsError(f"key file {file}, line {number}: sha256: must have 64 hex digits")
    return _named_key(f"key file {file}, line {number}", named, _digest(rest), limits)


def _named_key(where: str, named: re.Match[str], digest: bytes, limits: KeyLimits) -> Key:
    name, options = named.groups()
    if options is None:
        return Key(name, digest, name, limits)
    words = options.split("+")
    tiers = [word for word in words if ":" not in word]
    try:
        limits = limits.changed(word for word in words if ":" in word)
    except ValueError as error:
        raise SettingsError(f"{where}: the limits of {name!r}: {error}") from None
    try:
        return Key(name, digest, name, limits, get_tiers("+".join(tiers)) if tiers else EVERY_TIER)
    except ValueError:
        known = ", ".join(tier.value for tier in Tier)
        raise SettingsError(
            f"{where}: the tiers of {name!r} must be of {known}, joined by `+`, got "
            f"{'+'.join(tiers)!r}"
        ) from None


def _digest(key: str) -> bytes:
    if key.startswith(_DIGEST) and _HEX.fullmatch(key.removeprefix(_DIGEST).lower()):
        return bytes.fromhex(key.removeprefix(_DIGEST))
    return hashlib.sha256(key.encode()).digest()
