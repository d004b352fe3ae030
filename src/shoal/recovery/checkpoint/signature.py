"""The signature of a checkpoint's manifest: HMAC-SHA256 under a key that lies elsewhere, checked when a run resumes.

A manifest has the sha256 of every file, so one signature covers the checkpoint. The key is RUN/keys/manifest.key, made
with the run's folder, or the file that SHOAL_SIGNING_KEY_FILE names, away from the run. A run without a key (one of an
earlier Shoal, or a copy of the checkpoints alone) has nothing to compare with: its checkpoints are taken as they are.
"""

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.manifest import MANIFEST, fsync
from shoal.transport.decoding import decode_json
from shoal.transport.secret_files import KEYS, MANIFEST_KEY, kept_secret, read_shared_secret

SIGNATURE = "manifest.sig"
KEY_VARIABLE = "SHOAL_SIGNING_KEY_FILE"
ACCEPT_UNSIGNED = "unsigned"  # with --accept
_DOMAIN = b"shoal checkpoint manifest 1\0"
_MOST_BYTES = 4096


class SignatureRefused(CheckpointError):
    """A checkpoint that somebody without the key has changed or put there."""


class ManifestSignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str  # which: the beginning of its sha256
    hmac_sha256: str


class ManifestSigner:
    """Signs and checks the checkpoints of one run. The key is read when it is needed first."""

    def __init__(self, run: Path, *, accept_unsigned: bool = False) -> None:
        self.run, self.accept_unsigned = run, accept_unsigned
        self._key: bytes | None = None

    @property
    def key(self) -> bytes:
        """Empty: this run does not sign."""
        if self._key is None:
            elsewhere = os.environ.get(KEY_VARIABLE)
            text = read_shared_secret(Path(elsewhere)) if elsewhere else kept_secret(self.key_file, make=False)
            self._key = text.encode()
        return self._key

    @property
    def key_file(self) -> Path:
        return self.run / KEYS / MANIFEST_KEY

    def sign(self, checkpoint: Path) -> None:
        """Signs a manifest that is written. The signature is on disk when this returns."""
        if self.key:
            path = checkpoint / SIGNATURE
            path.write_bytes(msgspec.json.encode(self._signature((checkpoint / MANIFEST).read_bytes())))
            fsync(path)
            fsync(checkpoint)

    def check(self, checkpoint: Path, manifest: bytes) -> str:
        """Raises SignatureRefused for a checkpoint that this run's key did not sign. Returns a note, or nothing."""
        found = self._read(checkpoint)
        if not self.key:
            where = f"no {self.key_file}, and {KEY_VARIABLE} is not set"
            return "" if found is None else f"{checkpoint.name} is signed, and was not compared: {where}"
        wanted = self._signature(manifest)
        if found is not None and hmac.compare_digest(found.hmac_sha256.encode(), wanted.hmac_sha256.encode()):
            return ""
        if found is None:
            what = f"has no valid {SIGNATURE}, and the checkpoints of this run are signed"
        elif found.key == wanted.key:
            what = f"{MANIFEST} is not the one that was signed: somebody has changed it"
        else:
            what = f"was signed with another key ({found.key}) than this run's ({wanted.key})"
        if self.accept_unsigned:
            return f"{checkpoint.name}: {what}; accepted (--accept {ACCEPT_UNSIGNED})"
        raise SignatureRefused(
            f"{checkpoint.name}: {what}",
            where=[str(checkpoint / MANIFEST), f"the key: {os.environ.get(KEY_VARIABLE) or self.key_file}"],
            fix=f"rm -r {checkpoint} to go on from the one before, or --accept {ACCEPT_UNSIGNED} if you trust it",
        )

    def _signature(self, manifest: bytes) -> ManifestSignature:
        name = hashlib.sha256(_DOMAIN + self.key).hexdigest()[:8]
        return ManifestSignature(key=name, hmac_sha256=hmac.digest(self.key, _DOMAIN + manifest, "sha256").hex())

    def _read(self, checkpoint: Path) -> ManifestSignature | None:
        try:
            with (checkpoint / SIGNATURE).open("rb") as file:
                return decode_json(file.read(_MOST_BYTES), ManifestSignature)
        except (OSError, msgspec.DecodeError):
            return None
