"""Sealed records: what a connection carries once its two ends have exchanged keys through TLS. Pure.

    length, 4 bytes │ sealed bytes │ tag, 16 bytes │ length │ …

Each direction has a secret of its own, which nobody else has had before: a key for AES-128-GCM, and a mask that makes
the nonce of a record from its number, as in TLS 1.3. So a record that is changed, repeated, left out or moved does not
open. After REKEY_RECORDS records both ends derive the next secret from the last, so no key seals more than 16 GiB, and
a secret that leaks does not open what came before it.

TLS does the same with records of 16 KB at most. These are up to 16 times as long, and the OpenSSL of `cryptography` is
newer than that of most Pythons: together less than half of the processor time of TLS, which decides on fast links.
"""

import hashlib
import hmac
import secrets
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Buffer = bytes | bytearray | memoryview
KEY_BYTES = 32  # of a direction's secret: a key and a mask are made of it, and the next secret
CIPHER_KEY_BYTES, NONCE_BYTES = 16, 12
RECORD_BYTES = 256 << 10  # of a record at most, before it is sealed: the next one is sealed while it travels
LENGTH = struct.Struct("<I")
TAG_BYTES = 16
OVERHEAD_BYTES = LENGTH.size + TAG_BYTES
REKEY_RECORDS = 1 << 16


class RecordDamaged(ValueError):
    """A record that the other end has not sealed, or not as the next one."""


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


class RecordCipher:
    """The key of one direction. Both ends count the records."""

    def __init__(self, key: bytes) -> None:
        self._use(key)

    def _use(self, key: bytes) -> None:
        self._key, self._count = key, 0
        self._cipher = AESGCM(key[:CIPHER_KEY_BYTES])
        self._mask = int.from_bytes(key[CIPHER_KEY_BYTES : CIPHER_KEY_BYTES + NONCE_BYTES], "little")

    def _next_nonce(self) -> bytes:
        if self._count == REKEY_RECORDS:
            self._use(hmac.digest(self._key, b"shoal: the next key of this direction", hashlib.sha256))
        self._count += 1
        return (self._mask ^ self._count).to_bytes(NONCE_BYTES, "little")

    def seal(self, plain: Buffer, record: memoryview) -> int:
        """Writes a record, and returns its length."""
        size, nonce = len(plain), self._next_nonce()  # first: it may change the key
        LENGTH.pack_into(record, 0, size)
        self._cipher.encrypt_into(nonce, plain, None, record[LENGTH.size : OVERHEAD_BYTES + size])
        return size + OVERHEAD_BYTES

    def open(self, record: memoryview, plain: memoryview) -> None:
        """Opens the next record, without its length, into memory of just that length. What does not open leaves zeros
        there."""
        nonce = self._next_nonce()
        try:
            self._cipher.decrypt_into(nonce, record, None, plain)
        except InvalidTag:
            plain[:] = bytes(len(plain))
            raise RecordDamaged("a record was changed on its way") from None


def length_error(size: int) -> RecordDamaged:
    """For a length that no record has."""
    return RecordDamaged(f"a record announces {size} bytes, and none has more than {RECORD_BYTES}")
