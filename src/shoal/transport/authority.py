"""The authority of a run: signs a certificate for each process, and keeps the list of those that are revoked.

`key_folder.py` has the files.
"""

import time
from pathlib import Path
from typing import Self

from shoal.errors import InputError
from shoal.transport import certificates
from shoal.transport.credentials import SHARED_RUN, VALID_BEFORE, VALID_DAYS, Credentials, read_revoked, uri_of
from shoal.transport.identity import Role
from shoal.transport.secret_files import make_private_folder, read_secret, write_secret

AUTHORITY = "authority.pem"
REVOKED = "revoked"


class RunAuthority:
    def __init__(self, run: str, key_text: str, folder: Path | None = None) -> None:
        self.run = run
        self.folder = folder  # with the list of revoked certificates; None: not saved yet
        self._key = certificates.read_key(key_text)
        self.certificate = certificates.authority_certificate(self._key)

    def __repr__(self) -> str:
        return f"RunAuthority({self.run})"

    @classmethod
    def new(cls, run: str) -> Self:
        return cls(run, certificates.key_text(certificates.new_key()))

    @classmethod
    def from_secret(cls, secret: str, run: str = SHARED_RUN) -> Self:
        """The same authority on each host that has the secret."""
        return cls(run, certificates.key_text(certificates.key_from_secret(secret, "authority")))

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / AUTHORITY
        name, _, key_text = read_secret(path, "the authority of a run").partition("\n")
        try:
            return cls(name.removeprefix("# shoal run "), key_text, folder)
        except ValueError:
            raise InputError(
                f"{path} has no authority of a run", fix=f"rm {path}; the next start of the run makes a new one"
            ) from None

    def save(self, folder: Path) -> None:
        make_private_folder(folder)
        write_secret(folder / AUTHORITY, self.file_text())
        if not (folder / REVOKED).exists():
            write_secret(folder / REVOKED, "")
        self.folder = folder

    def file_text(self) -> str:
        """What `load` reads. Has the key."""
        return f"# shoal run {self.run}\n{certificates.key_text(self._key)}"

    def issue(self, role: Role, name: str, now: float | None = None) -> Credentials:
        begin = (time.time() if now is None else now) - VALID_BEFORE
        end = begin + VALID_DAYS * 86400
        certificate, key, serial = certificates.process_certificate(self._key, uri_of(self.run, role, name), begin, end)
        return Credentials(
            authority=self.certificate,
            certificate=certificate,
            key=key,
            run=self.run,
            role=role,
            name=name,
            serial=serial,
            valid_from=begin,
            valid_until=end,
            revoked=tuple(sorted(self.revoked)),
            revoked_file="" if self.folder is None else str((self.folder / REVOKED).absolute()),
        )

    @property
    def revoked(self) -> frozenset[int]:
        return frozenset() if self.folder is None else read_revoked(self.folder / REVOKED)

    def revoke(self, serial: int, name: str = "") -> None:
        """Takes effect at each process when the next connection is made to it, or by it."""
        if self.folder is None:
            raise InputError("an authority without a folder has no list of revoked certificates")
        path = self.folder / REVOKED
        if serial not in self.revoked:
            before = path.read_text() if path.exists() else ""
            write_secret(path, f"{before}{serial:x} {name}".rstrip() + "\n")
