"""Certificates for tests: an authority, and what it signs for localhost."""

import datetime
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `file` is its own."""

    key: ec.EllipticCurvePrivateKey
    file: Path
    name: x509.Name

    def sign(
        self, folder: Path, common_name: str = "localhost", password: str | None = None
    ) -> tuple[Path, Path]:
        """Write a certificate for localhost and its key; return both files."""
        key = ec.generate_private_key(ec.SECP256R1())
        # A fresh chroot resolves no localhost.
        hosts = (x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1")))
        names = x509.SubjectAlternativeName(hosts)
        builder = _builder(_name(common_name), self.name, key).add_extension(names, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        folder.mkdir(exist_ok=True)
        lock = (
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password.encode())
        )
        cert_file, key_file = folder / "cert.pem", folder / "key.pem"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        )
        return cert_file, key_file


def make_authority(folder: Path) -> Authority:
    """Write a new authority's certificate into the folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("test authority")
    constraint = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, name, key).add_extension(constraint, critical=True)
    file = folder / "authority.pem"
    certificate = builder.sign(key, hashes.SHA256())
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(key, file, name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
