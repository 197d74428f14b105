"""Streams are encrypted where Ray is, and both ends have to show a certificate."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deployments.transport.messages import VERIFY
from deployments.transport.stream_client import WorkerStream
from deployments.transport.tls import stream_tls
from tests.deployments.transport.streams import PATIENCE_S, Replica, make_request
from workers.types import VerifyRequest, VerifyResult


@dataclass(frozen=True)
class Authority:
    """Who vouches for nodes."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
        basic = x509.BasicConstraints(ca=True, path_length=None)
        certificate = _unsigned(name, name, key).add_extension(basic, critical=True)
        return cls(certificate.sign(key, hashes.SHA256()), key)

    def vouch(self, folder: Path, address: str) -> None:
        """Write the certificate and the key of a node, and the authority's own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a node")])
        addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            _unsigned(name, self.certificate.subject, key)
            .add_extension(addresses, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        folder.mkdir()
        pem = serialization.Encoding.PEM
        (folder / "ca").write_bytes(self.certificate.public_bytes(pem))
        (folder / "certificate").write_bytes(certificate.public_bytes(pem))
        (folder / "key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(folder / "ca"))
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(folder / "certificate"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(folder / "key"))


async def open_stream(replica: Replica) -> WorkerStream[VerifyRequest, VerifyResult]:
    return await WorkerStream.open(replica.report.address, VERIFY)


async def test_a_stream_is_encrypted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Authority.make().vouch(tmp_path / "node", "127.0.0.1")
    use(monkeypatch, tmp_path / "node")
    replica = Replica()
    await replica.listen()
    stream = await open_stream(replica)
    reply = await stream.call([make_request(new_tokens=(1,) * 50_000)], timeout_s=PATIENCE_S)
    assert len(reply.results[0].tokens) == 50_000
    assert stream.transport.get_extra_info("cipher") is not None
    (served,) = replica.server.streams
    assert served.transport.get_extra_info("peercert")["subject"] == ((("commonName", "a node"),),)
    stream.close()
    replica.server.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"], ids=["authority", "address"])
async def test_who_is_not_vouched_for_is_no_replica(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the same authority, and for the address that it has."""
    authority = Authority.make()
    authority.vouch(tmp_path / "server", address)
    known = authority if address != "127.0.0.1" else Authority.make()
    known.vouch(tmp_path / "router", "127.0.0.1")
    use(monkeypatch, tmp_path / "server")
    replica = Replica()
    await replica.listen()
    use(monkeypatch, tmp_path / "router")
    with pytest.raises(ssl.SSLCertVerificationError):
        await open_stream(replica)
    assert not replica.server.streams
    replica.server.close()


async def test_who_shows_no_certificate_is_not_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Authority.make().vouch(tmp_path / "node", "127.0.0.1")
    use(monkeypatch, tmp_path / "node")
    replica = Replica()
    await replica.listen()
    bare = ssl.create_default_context(cafile=str(tmp_path / "node" / "ca"))
    monkeypatch.setattr("deployments.transport.stream_client.stream_tls", lambda _: bare)
    stream = await open_stream(replica)  # with TLS 1.3 the refusal comes later
    with pytest.raises(Exception, match="is lost"):
        await stream.call([make_request()], timeout_s=PATIENCE_S)
    assert replica.num_calls == 0
    replica.server.close()


def test_streams_are_plain_where_ray_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "0")
    assert stream_tls(ssl.Purpose.CLIENT_AUTH) is None
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.delenv("RAY_TLS_SERVER_CERT", raising=False)
    with pytest.raises(RuntimeError, match="RAY_TLS_SERVER_CERT"):
        stream_tls(ssl.Purpose.CLIENT_AUTH)
