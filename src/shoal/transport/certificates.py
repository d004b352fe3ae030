"""Certificates of a run as PEM texts: an authority that signs, and leaves that name one process each.

Ed25519 keys. A leaf names its process in one place, a URI among the alternative names: `shoal:RUN/ROLE/NAME`.
"""

import datetime
import hashlib
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal authority of a run")])
FIRST_DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)  # of an authority: it is known by its key, not by a date
LAST_DAY = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def key_from_secret(secret: str, purpose: str) -> Ed25519PrivateKey:
    """The same key on every host that has the secret; other purposes have other keys."""
    derive = HKDF(algorithm=hashes.SHA256(), length=32, salt=b"shoal keys 1", info=purpose.encode())
    return Ed25519PrivateKey.from_private_bytes(derive.derive(secret.encode()))


def key_text(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def read_key(text: str) -> Ed25519PrivateKey:
    """Raises ValueError if the text is no Ed25519 key."""
    try:
        key = serialization.load_pem_private_key(text.encode(), None)
    except Exception as error:  # of a damaged file `cryptography` raises this and that, an error of its own among them
        raise ValueError(f"it cannot be read: {type(error).__name__}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("it is not an Ed25519 key")
    return key


def authority_certificate(key: Ed25519PrivateKey) -> str:
    """Follows from the key alone, so hosts that derive the key from one secret have one certificate."""
    public = key.public_key()
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(AUTHORITY_NAME)
        .issuer_name(AUTHORITY_NAME)
        .public_key(public)
        .serial_number(int.from_bytes(hashlib.sha256(raw).digest()[:8]) | 1)
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return _pem(builder.sign(key, None))


def process_certificate(authority: Ed25519PrivateKey, uri: str, begin: float, end: float) -> tuple[str, str, int]:
    """Returns certificate, key and serial number of a process. `begin` and `end` are seconds since 1970."""
    key = new_key()
    serial = secrets.randbits(63) | 1
    public = authority.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal process")]))
        .issuer_name(AUTHORITY_NAME)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(datetime.datetime.fromtimestamp(int(begin), datetime.UTC))
        .not_valid_after(datetime.datetime.fromtimestamp(int(end), datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    )
    return _pem(builder.sign(authority, None)), key_text(key), serial


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
