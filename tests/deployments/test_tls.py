"""What is said of a certificate or a key that cannot encrypt."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.args import AppArgs, parse_options
from deployments.tls import TlsFiles, check_tls
from tests.certificates import make_certificate
from workers.errors import ConfigError


def check(**options: str) -> None:
    check_tls(AppArgs(**options))  # type: ignore[arg-type]


def test_a_certificate_and_its_key_are_taken(tmp_path: Path) -> None:
    check(**make_certificate(tmp_path).options)
    check()


def test_both_are_given_or_neither() -> None:
    with pytest.raises(ConfigError, match="tls_cert_file is given without tls_key_file"):
        parse_options({"tls_cert_file": "a"})
    with pytest.raises(ConfigError, match="tls_key_file is given without tls_cert_file"):
        parse_options({"tls_key_file": "a"})


def missing(folder: Path) -> dict[str, str]:
    return {**make_certificate(folder).options, "tls_cert_file": str(folder / "none.crt")}


def a_folder(folder: Path) -> dict[str, str]:
    return {**make_certificate(folder).options, "tls_key_file": str(folder)}


def exchanged(folder: Path) -> dict[str, str]:
    made = make_certificate(folder)
    return {"tls_cert_file": str(made.key_file), "tls_key_file": str(made.cert_file)}


def no_text(folder: Path) -> dict[str, str]:
    made = make_certificate(folder)
    made.key_file.write_bytes(b"\xff\xfe\x00")
    return made.options


def of_another(folder: Path) -> dict[str, str]:
    other = make_certificate(folder, "other")
    return {**make_certificate(folder).options, "tls_key_file": str(other.key_file)}


def with_a_password(folder: Path) -> dict[str, str]:
    return make_certificate(folder, password=b"secret").options


def cut_off(folder: Path) -> dict[str, str]:
    made = make_certificate(folder)
    made.cert_file.write_text(made.cert_file.read_text()[:200])
    return made.options


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (missing, "^tls_cert_file is '.*none.crt', which cannot be read: No such file"),
        (a_folder, "^tls_key_file is .*, which cannot be read: Is a directory"),
        (exchanged, "^tls_cert_file is .*, which holds no certificate in PEM"),
        (no_text, "^tls_key_file is .*, which holds no private key in PEM"),
        (of_another, "which is the key of another certificate than tls_cert_file="),
        (with_a_password, "^tls_key_file is .*, which asks for a password"),
        (cut_off, "^tls_cert_file=.* cannot be used: .*; both have to be whole PEM files"),
    ],
)
def test_what_cannot_encrypt_is_named(
    make: Callable[[Path], dict[str, str]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(**make(tmp_path))


def test_other_processes_get_whole_paths() -> None:
    """They run in folders of their own."""
    files = TlsFiles.of(AppArgs(tls_cert_file="a.crt", tls_key_file="/etc/a.key"))
    assert files == TlsFiles(cert_file=str(Path.cwd() / "a.crt"), key_file="/etc/a.key")
    assert TlsFiles.of(AppArgs()) == TlsFiles(cert_file=None, key_file=None)
