"""The certificate and the key by which HTTP and gRPC are encrypted, checked before a start."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ray.serve.context import _get_global_client

from deployments.args import AppArgs
from workers.errors import ConfigError

CERTIFICATE = "-----BEGIN CERTIFICATE-----"
PRIVATE_KEY = "PRIVATE KEY-----"
"""The end of a line that begins a key, whatever its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where certificate and key lie, as processes in other folders find them; or neither."""

    cert_file: str | None
    key_file: str | None

    @classmethod
    def of(cls, args: AppArgs) -> Self:
        cert_file, key_file = (
            None if path is None else str(Path(path).absolute())
            for path in (args.tls_cert_file, args.tls_key_file)
        )
        return cls(cert_file=cert_file, key_file=key_file)


def check_tls(args: AppArgs) -> None:
    """Raise ConfigError if the certificate or its key cannot be used; does nothing without them.

    It speaks of this machine's files. Every node with a proxy of Serve's has its own.
    """
    if args.tls_cert_file is None or args.tls_key_file is None:
        return
    _check_pem("tls_cert_file", args.tls_cert_file, CERTIFICATE, "a certificate")
    _check_pem("tls_key_file", args.tls_key_file, PRIVATE_KEY, "a private key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            args.tls_cert_file, args.tls_key_file, password=lambda: _refuse_password(args)
        )
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"tls_key_file is {args.tls_key_file!r}, which is the key of another certificate "
                f"than tls_cert_file={args.tls_cert_file}; give the two that belong together"
            ) from None
        raise ConfigError(
            f"tls_cert_file={args.tls_cert_file} and tls_key_file={args.tls_key_file} cannot be "
            f"used: {error.reason or error}; both have to be whole PEM files"
        ) from None


def check_serve_has_tls(args: AppArgs) -> None:
    """Raise ConfigError if clients would not be encrypted though the options say so.

    A Serve that ran before this app keeps the ports that it was started with.
    """
    client = _get_global_client()
    assert client is not None, "Serve was started before"
    if args.tls_cert_file is not None and client.http_config.ssl_certfile is None:
        raise ConfigError(
            f"tls_cert_file is {args.tls_cert_file!r}, but Serve runs already, without encryption; "
            "leave the option out and give http_options of the config file ssl_certfile and "
            "ssl_keyfile (gRPC then needs a proxy with TLS in front), or end Serve first"
        )


def _check_pem(option: str, path: str, begin: str, what: str) -> None:
    """Raise ConfigError if a file cannot be read or holds no such thing."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            f"{option} is {path!r}, which cannot be read: {error.strerror}; give the path of a PEM "
            f"file with {what}"
        ) from None
    except UnicodeDecodeError:
        text = ""
    if begin not in text:
        raise ConfigError(f"{option} is {path!r}, which holds no {what.split(' ', 1)[1]} in PEM")


def _refuse_password(args: AppArgs) -> str:
    raise ConfigError(
        f"tls_key_file is {args.tls_key_file!r}, which asks for a password; give a key without "
        "one, as `openssl pkey -in <file>` writes it, that only the server's user may read"
    )
