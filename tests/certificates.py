"""Certificates for tests, made on the fly."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A certificate that signs itself, for this machine, and its key: PEM files."""

    cert_file: Path
    key_file: Path

    @property
    def options(self) -> dict[str, str]:
        """The app's, to serve with it."""
        return {"tls_cert_file": str(self.cert_file), "tls_key_file": str(self.key_file)}


def make_certificate(
    folder: Path, name: str = "server", password: bytes | None = None
) -> Certificate:
    """Write it to a folder; with a password, the key is encrypted."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Certificate(cert_file=folder / f"{name}.crt", key_file=folder / f"{name}.key")
    made.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encryption = (
        serialization.NoEncryption()
        if password is None
        else serialization.BestAvailableEncryption(password)
    )
    made.key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    return made
