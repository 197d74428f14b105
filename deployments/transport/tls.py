"""TLS for worker streams: as Ray has it for its own connections, by the same certificates."""

import ssl
import tempfile

from ray._common.tls_utils import load_certs_from_env
from ray._common.utils import env_bool


def stream_tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """What encrypts a stream and makes sure of both ends; None where Ray's connections are plain.

    Ray is told by RAY_USE_TLS, and finds its certificates by RAY_TLS_SERVER_CERT,
    RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT. Raises RuntimeError where one is not named.

    Args:
        purpose: CLIENT_AUTH for the end that listens, SERVER_AUTH for the one that connects.
    """
    if not env_bool("RAY_USE_TLS", False):
        return None
    certificate, key, authority = load_certs_from_env()
    context = ssl.create_default_context(purpose, cadata=authority.decode())
    context.verify_mode = ssl.CERT_REQUIRED  # of routers too
    with tempfile.NamedTemporaryFile() as file:  # ssl reads no other
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
