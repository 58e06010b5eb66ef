"""TLS on a real socket: certificates of both sides, renewal, and what is wrong at start."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http.listener import Tls
from server.settings import ServerSettings, SettingsError
from tests.server.certificates import Authority, make_authority
from tests.server.scripted import Running, running, said


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path)


def files(cert: Path, key: Path, **more: Any) -> dict[str, Any]:
    return {"ssl_certfile": cert, "ssl_keyfile": key, **more}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def get(service: Running, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context) as client:
        answer = await client.get(f"https://127.0.0.1:{service.port}/livez")
        return answer.status_code


async def seen_name(service: Running, authority: Authority) -> str:
    """The common name of the certificate that a new connection gets."""
    context = trusting(authority)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port, ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(certificate["subject"][0][0][1])


async def test_it_serves_over_tls_with_a_key_that_has_a_password(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.sign(tmp_path / "a", password="hush")
    settings = files(cert, key, ssl_keyfile_password="hush")
    async with running(tmp_path, client_context=trusting(authority), **settings) as service:
        assert await get(service, trusting(authority)) == 200
        with pytest.raises(httpx.ConnectError):
            await get(service, ssl.create_default_context())
        old = trusting(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        assert await get(service, old) == 200


async def test_client_certificates_can_be_required(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(tmp_path / "a")
    settings = files(cert, key, ssl_ca_certs=authority.file, ssl_cert_reqs="required")
    known = trusting(authority)
    known.load_cert_chain(*authority.sign(tmp_path / "client", "someone"))
    async with running(tmp_path, client_context=known, **settings) as service:
        assert await get(service, known) == 200
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            await get(service, trusting(authority))


async def test_a_renewed_certificate_is_used_and_half_a_one_is_not(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.sign(tmp_path / "a", "first")
    settings = files(cert, key, enable_ssl_refresh=True)
    async with running(tmp_path, client_context=trusting(authority), **settings) as service:
        assert await seen_name(service, authority) == "first"
        new_cert, new_key = authority.sign(tmp_path / "b", "second")
        shutil.copy(new_cert, cert)
        await said(caplog, "Kept the previous TLS certificate")
        # The certificate's key is not there yet.
        assert await seen_name(service, authority) == "first"
        os.mkfifo(tmp_path / "pipe")
        caplog.clear()
        (tmp_path / "pipe").replace(key)
        await said(caplog, "Kept the previous TLS certificate")
        assert await seen_name(service, authority) == "first"
        key.unlink()
        shutil.copy(new_key, key)
        async with asyncio.timeout(10):
            while await seen_name(service, authority) != "second":
                await asyncio.sleep(0.1)


def test_what_is_wrong_is_said_at_start(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(tmp_path / "a", password="hush")
    _, other = authority.sign(tmp_path / "b")
    os.mkfifo(pipe := tmp_path / "pipe")
    for settings, words in [
        (files(tmp_path / "nowhere.pem", key), "nowhere.pem"),
        (files(cert, other), "--ssl-keyfile"),
        (files(pipe, key), "--ssl-certfile .*pipe .*not a regular file"),
        (files(cert, pipe), "--ssl-keyfile .*pipe .*not a regular file"),
        (files(cert, key, ssl_ca_certs=pipe), "--ssl-ca-certs .*not a regular file"),
        (files(cert, key), "--ssl-keyfile"),
        (files(cert, key, ssl_keyfile_password="wrong"), "--ssl-keyfile"),
        (files(cert, key, ssl_keyfile_password="hush", ssl_ciphers="NONSENSE"), "NONSENSE"),
    ]:
        with pytest.raises(SettingsError, match=words) as caught:
            Tls(ServerSettings(**settings))
        assert "hush" not in str(caught.value)
