"""The folder `keys` of a run: its authority, the credentials of each process, and who has had some.

RUN/keys/                  0700, each file 0600
    authority.pem          the authority's key: the driver's alone
    next.pem               the authority of the next sitting, after `shoal keys rotate`
    worker-0.1.json        credentials of one process: worker 0, incarnation 1
    issued.jsonl           a line for each certificate: whose, and until when; no keys
    revoked                serial numbers that nobody accepts any more
    servers.key            the token of the parameter servers
    manifest.key           signs the manifests of checkpoints (recovery/checkpoint/signature.py)
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.errors import InputError
from shoal.transport.authority import AUTHORITY, REVOKED, RunAuthority
from shoal.transport.credentials import CREDENTIALS_VARIABLE, Credentials, read_revoked
from shoal.transport.decoding import decode_json
from shoal.transport.identity import Role
from shoal.transport.secret_files import write_secret

NEXT = "next.pem"
ISSUED = "issued.jsonl"


class IssuedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    role: Role
    name: str
    serial: int
    valid_from: float
    valid_until: float

    @property
    def process(self) -> str:
        """As a user names it: worker-0.1"""
        return bundle_name(self.role, self.name)


def bundle_name(role: Role, name: str) -> str:
    return f"{role}-{name}" if name else str(role)


class KeyFolder:
    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self._authority: RunAuthority | None = None

    @property
    def has_authority(self) -> bool:
        return (self.path / AUTHORITY).exists()

    @property
    def is_rotated(self) -> bool:
        """Whether the next sitting has another authority."""
        return (self.path / NEXT).exists()

    @property
    def revoked(self) -> frozenset[int]:
        return read_revoked(self.path / REVOKED)

    @property
    def authority(self) -> RunAuthority:
        """The run's; made when it is needed first."""
        if self._authority is None:
            if self.has_authority:
                self._authority = RunAuthority.load(self.path)
            else:
                self._authority = RunAuthority.new(self.run)
                self._authority.save(self.path)
        return self._authority

    def begin(self) -> None:
        """A sitting of the run begins: an authority that was made by `rotate` takes the place of the former one."""
        if self.is_rotated:
            for found in (*self.path.glob("*.json"), self.path / ISSUED, self.path / REVOKED):
                found.unlink(missing_ok=True)
            os.replace(self.path / NEXT, self.path / AUTHORITY)
            self._authority = None
        authority = self.authority
        authority.save(self.path)  # with its list of revoked certificates

    def rotate(self) -> None:
        """Makes the authority of the next sitting. The processes that run now go on with the present one."""
        self._check_exists()
        fresh = RunAuthority.new(self.run)
        write_secret(self.path / NEXT, fresh.file_text())

    def credentials(self, role: Role, name: str = "") -> Credentials:
        """New ones, which are also in the file `bundle(role, name)`."""
        made = self.authority.issue(role, name)
        made.save(self.bundle(role, name))
        noted = IssuedCertificate(
            role=role, name=name, serial=made.serial, valid_from=made.valid_from, valid_until=made.valid_until
        )
        descriptor = os.open(self.path / ISSUED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(noted) + b"\n")
        finally:
            os.close(descriptor)
        return made

    def bundle(self, role: Role, name: str = "") -> Path:
        return self.path / f"{bundle_name(role, name)}.json"

    def variables(self, role: Role, name: str) -> dict[str, str]:
        """For the environment of a new process: where its credentials are."""
        self.credentials(role, name)
        return {CREDENTIALS_VARIABLE: str(self.bundle(role, name).absolute())}

    def issued(self) -> list[IssuedCertificate]:
        found = []
        with suppress(FileNotFoundError):
            for line in (self.path / ISSUED).read_bytes().splitlines():
                with suppress(msgspec.DecodeError):  # a torn line
                    found.append(decode_json(line, IssuedCertificate))
        return found

    def revoke(self, name: str) -> list[IssuedCertificate]:
        """Revokes every certificate of a process, named as `issued` names it, or the one of a serial number."""
        self._check_exists()
        issued = self.issued()
        meant = [each for each in issued if name in (each.process, f"{each.serial:x}")]
        meant = meant or [each for each in issued if each.process.startswith(f"{name}.")]  # every incarnation
        if not meant:
            known = ", ".join(dict.fromkeys(each.process for each in issued)) or "none"
            raise InputError(f"run {self.run} has no certificate of {name!r}; it has: {known}")
        for each in meant:
            self.authority.revoke(each.serial, each.process)
        return meant

    def _check_exists(self) -> None:
        if not self.has_authority:
            raise InputError(
                f"run {self.run} has no authority: it ran on one host, where sockets of this user need no certificates",
                fix="keys are made when a run has several hosts",
            )
