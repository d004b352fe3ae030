"""One plain line for a TLS handshake or record that failed: who is here, who is there, what to do."""

import ssl

from shoal.transport.identity import PeerIdentity, PeerRefused

# Reasons of OpenSSL, by the beginning of their name. "ALERT" in a name: the other end has found it, and said so.
FOREIGN = "its certificate is of another authority (another run, or another secret)"
WHAT_IT_MEANS = (
    ("CERTIFICATE_VERIFY_FAILED", FOREIGN),
    (
        "TLSV1_ALERT_UNKNOWN_CA",
        "it does not know the authority of this end's certificate (another run, or another secret)",
    ),
    ("TLSV1_ALERT_DECRYPT_ERROR", "it does not accept this end's certificate (another run, or another secret)"),
    ("SSLV3_ALERT_BAD_CERTIFICATE", "it does not accept this end's certificate"),
    ("SSLV3_ALERT_CERTIFICATE", "it does not accept this end's certificate"),
    ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "it wants a certificate, and this end has shown none"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it has shown no certificate"),
    ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "a record was changed on its way"),
    ("SSLV3_ALERT_BAD_RECORD_MAC", "a record of this end was changed on its way"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS (a plaintext peer, or another program on this port)"),
    ("HTTP_REQUEST", "it speaks HTTP, not TLS"),
    ("HTTPS_PROXY_REQUEST", "it speaks HTTP, not TLS"),
    ("UNSUPPORTED_PROTOCOL", "it speaks an older TLS than 1.3"),
    ("TLSV1_ALERT_PROTOCOL_VERSION", "it speaks no TLS 1.3"),
    (
        "UNEXPECTED_EOF",
        "it closed the connection before it had proved who it is (it refused this end, or speaks no TLS)",
    ),
)
SAME_RUN = "start both ends in one run, or with the same SHOAL_SECRET_FILE"
NOT_TLS = "give the other end SHOAL_CREDENTIALS or SHOAL_SECRET_FILE, and check the port"
CHANGED = "the connection is given up; look for what changes packets between the two hosts"


def describe_tls_error(error: OSError, own: PeerIdentity, peer: str) -> str:
    """`peer` is the other end's address, as far as it is known."""
    if isinstance(error, PeerRefused):
        return str(error)
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, (ssl.SSLEOFError, ConnectionResetError)):
        reason = "UNEXPECTED_EOF"
    meaning = next((text for name, text in WHAT_IT_MEANS if reason.startswith(name)), None)
    if meaning is None:
        detail = (reason or error.strerror or str(error)).replace("_", " ").lower()
        return f"{peer} refused by {own}: the TLS handshake failed ({detail}); {NOT_TLS}"
    return f"{peer} and {own} cannot talk: {meaning}; {_advice(reason)}"


def _advice(reason: str) -> str:
    if "RECORD_MAC" in reason:
        return CHANGED
    if reason.startswith(
        ("WRONG_VERSION", "HTTP", "UNSUPPORTED", "UNEXPECTED_EOF", "TLSV1_ALERT_PROTOCOL", "PEER_DID")
    ):
        return NOT_TLS
    return SAME_RUN
