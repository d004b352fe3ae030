"""Parsers of keys, certificates and signatures, for tests/fuzz."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from helpers.fuzzing import FuzzTarget
from shoal.errors import CheckpointError, InputError
from shoal.recovery.checkpoint.signature import SIGNATURE, ManifestSignature, ManifestSigner
from shoal.transport.authority import AUTHORITY, RunAuthority
from shoal.transport.credentials import Credentials, _named_by, read_revoked
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.key_folder import ISSUED, KeyFolder
from shoal.transport.secret_files import KEYS, MANIFEST_KEY, kept_secret, read_shared_secret

URI = "shoal:7f3a/worker/3.1"


def key_targets(folder: Path) -> list[FuzzTarget]:
    """`folder`: an empty one, for the files."""
    authority = RunAuthority.new("7f3a")
    authority.save(folder)
    issued = authority.issue(Role.WORKER, "3.1")
    KeyFolder(folder, "7f3a").credentials(Role.WORKER, "3.1")
    lines = (folder / ISSUED).read_text()
    kept_secret(folder / "run" / KEYS / MANIFEST_KEY, make=True)
    signature = ManifestSignature(key="0" * 8, hmac_sha256="0" * 64)

    def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        path = folder / name

        def call(data: bytes) -> object:
            path.write_bytes(data)
            path.chmod(0o600)
            return read(path)

        return call

    def load(path: Path) -> object:
        return Credentials.load(path).context(False)

    def check(path: Path) -> object:
        return ManifestSigner(folder / "run").check(path.parent, b"{}")

    def name(data: bytes) -> object:
        return _named_by({"subjectAltName": (("URI", data.decode(errors="replace")),), "serialNumber": "1F"})

    def text(content: str) -> Callable[[random.Random], str]:
        return lambda chance: content

    def tree(value: Any) -> Callable[[random.Random], Any]:
        return lambda chance: msgspec.to_builtins(value)

    bad = (InputError,)
    return [
        FuzzTarget("credentials", file("c.json", load), tree(issued), bad, "json", cost=20),
        FuzzTarget("authority", file(AUTHORITY, lambda path: RunAuthority.load(path.parent)),
                   text(authority.file_text()), bad, "text", cost=20),
        FuzzTarget("revoked", file("list", read_revoked), text("1f2e worker-0.1\nabc\n"), (PeerRefused,), "text"),
        FuzzTarget("issued", file(ISSUED, lambda path: KeyFolder(path.parent, "7f3a").issued()), text(lines), (),
                   "text"),
        FuzzTarget("shared_secret", file("secret", read_shared_secret), text("x" * 43), bad, "text"),
        FuzzTarget("signature", file(SIGNATURE, check), tree(signature), (CheckpointError,), "json"),
        FuzzTarget("certificate_name", name, text(URI), (PeerRefused,), "text"),
    ]  # fmt: skip
