"""What a process shows to prove who it is, and how it knows the others: TLS 1.3, both ends with a certificate.

The store's process imports this module without torch: standard library and msgspec; certificates are made only where a
shared secret is given instead of a file.
"""

import os
import socket
import ssl
import tempfile
import time
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import msgspec

from shoal.errors import InputError
from shoal.transport.decoding import decode_json
from shoal.transport.identity import PeerIdentity, PeerRefused, Role
from shoal.transport.secret_files import checked_secret, read_secret, read_shared_secret, write_secret
from shoal.transport.tls_errors import describe_tls_error

CREDENTIALS_VARIABLE = "SHOAL_CREDENTIALS"
SECRET_FILE_VARIABLE = "SHOAL_SECRET_FILE"
SECRET_VARIABLE = "SHOAL_SECRET"
SHARED_RUN = (
    "shared-secret"  # the run's name in certificates from a shared secret: the secret says who belongs together
)
VALID_BEFORE = 3600.0  # seconds: clocks may differ by this much
VALID_DAYS = 398
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: `identify` checks the time, and says both clocks


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's certificate and key, and the authority whose certificates it accepts. Never shown: see __repr__."""

    authority: str  # PEM texts
    certificate: str
    key: str
    run: str  # these say what the certificate says
    role: Role
    name: str
    serial: int
    valid_from: float
    valid_until: float
    revoked: tuple[int, ...] = ()  # serial numbers
    revoked_file: str = ""  # more of them; read again when it changes

    def __repr__(self) -> str:
        return f"Credentials({self.identity}, serial {self.serial:x})"

    @property
    def identity(self) -> PeerIdentity:
        return PeerIdentity(self.run, self.role, self.name, self.serial)

    def context(self, server_side: bool) -> ssl.SSLContext:
        """Only for connections whose peer is then named by `identify`, which checks time, run and revocation."""
        try:
            return _tls_context(self.authority, self.certificate, self.key, server_side)
        except (ssl.SSLError, ValueError, TypeError) as error:
            why = str(getattr(error, "reason", None) or error).replace("_", " ").lower()
            raise InputError(
                f"the credentials of {self.identity} cannot be used: {why}",
                fix="start the run again: its driver makes new ones",
            ) from None

    def identify(self, tls: ssl.SSLSocket | ssl.SSLObject, roles: Collection[Role] = tuple(Role)) -> PeerIdentity:
        """Who is at the other end of a finished handshake. Raises PeerRefused."""
        shown = tls.getpeercert()
        if not shown:
            raise PeerRefused(f"the other end showed no certificate to {self.identity}")
        peer = _named_by(shown)
        self._check_time(peer, shown)
        if peer.run != self.run:
            raise PeerRefused(f"{peer} has connected to {self.identity}: not the same run")
        if peer.serial in self.revoked or peer.serial in _revoked_in(self.revoked_file):
            raise PeerRefused(
                f"the certificate of {peer} (serial {peer.serial:x}) is revoked: {self.identity} does not accept it"
                "; shoal keys rotate RUN makes new ones for the next start"
            )
        if peer.role not in roles:
            allowed = " or ".join(sorted(roles)) or "nobody"
            raise PeerRefused(f"{peer} has connected to {self.identity}, which here accepts the role {allowed} alone")
        return peer

    def _check_time(self, peer: PeerIdentity, shown: dict[str, Any]) -> None:
        begin, end = (ssl.cert_time_to_seconds(str(shown[field])) for field in ("notBefore", "notAfter"))
        now = time.time()
        if now < begin:
            raise PeerRefused(
                f"clocks differ: here ({self.identity}, host {socket.gethostname()}) it is {clock_text(now)}, and the "
                f"certificate of {peer} was made at {clock_text(begin + VALID_BEFORE)} by its maker's clock; set the "
                "clock of the host that is wrong (timedatectl set-ntp true)"
            )
        if now > end:
            raise PeerRefused(
                f"the certificate of {peer} expired at {clock_text(end)}, and here ({self.identity}, host "
                f"{socket.gethostname()}) it is {clock_text(now)}; if the clock is right: shoal keys rotate RUN, then "
                "resume the run"
            )

    def check_own_time(self) -> None:
        """Raises InputError where this certificate is not valid by the clock of this host: others would only close the
        connection, and this end would not know why."""
        now, here = time.time(), f"here (host {socket.gethostname()}) it is"
        if now < self.valid_from:
            made = clock_text(self.valid_from + VALID_BEFORE)
            raise InputError(
                f"clocks differ: {here} {clock_text(now)}, and the certificate of {self.identity} was made at {made} "
                "by the clock of the run's driver",
                fix="set the clock of the host that is wrong (timedatectl set-ntp true)",
            )
        if now > self.valid_until:
            raise InputError(
                f"the certificate of {self.identity} expired at {clock_text(self.valid_until)}, and {here} "
                f"{clock_text(now)}",
                fix="set the clock if it is wrong (timedatectl set-ntp true); else shoal keys rotate RUN, and resume",
            )

    def save(self, path: Path) -> None:
        write_secret(path, msgspec.json.encode(self).decode())

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return decode_json(read_secret(path, "credentials of a process").encode(), cls)
        except msgspec.DecodeError:
            raise InputError(
                f"{path} has no credentials of a process, as the driver of a run writes them to RUN/keys",
                fix=f"unset {CREDENTIALS_VARIABLE}, or let it name such a file",
            ) from None


def tls_error_text(error: OSError, own: Credentials, peer: str = "the other end") -> str:
    """One plain line for a handshake or record that failed, or a peer that was refused. `peer` is an address."""
    return describe_tls_error(error, own.identity, peer)


def uri_of(run: str, role: Role, name: str) -> str:
    return f"shoal:{quote(run, safe='')}/{role}/{quote(name, safe='')}"


def clock_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def credentials_from_environment() -> Credentials | None:
    """From the file that the driver made for this process, or made here from the secret that all hosts share."""
    if path := os.environ.get(CREDENTIALS_VARIABLE):
        return Credentials.load(Path(path))
    if path := os.environ.get(SECRET_FILE_VARIABLE):
        return _from_secret(read_shared_secret(Path(path)), os.getpid())
    if secret := os.environ.get(SECRET_VARIABLE):
        return _from_secret(checked_secret(secret, SECRET_VARIABLE), os.getpid())
    return None


@lru_cache(maxsize=4)
def _from_secret(secret: str, pid: int) -> Credentials:
    rank = os.environ.get("RANK", "")
    return self_issued(secret, Role.WORKER, f"{rank or 'process'}@{socket.gethostname()}.{pid}")


def self_issued(secret: str, role: Role, name: str, now: float | None = None) -> Credentials:
    """Whoever has the secret is the authority, and makes its own certificate."""
    from shoal.transport import certificates  # `cryptography` takes a tenth of a second

    key = certificates.key_from_secret(secret, "authority")
    begin = (time.time() if now is None else now) - VALID_BEFORE
    end = begin + VALID_DAYS * 86400
    certificate, own_key, serial = certificates.process_certificate(key, uri_of(SHARED_RUN, role, name), begin, end)
    return Credentials(
        authority=certificates.authority_certificate(key),
        certificate=certificate,
        key=own_key,
        run=SHARED_RUN,
        role=role,
        name=name,
        serial=serial,
        valid_from=begin,
        valid_until=end,
    )


def _named_by(shown: dict[str, Any]) -> PeerIdentity:
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    if len(names) == 1 and names[0].startswith("shoal:"):
        parts = names[0].removeprefix("shoal:").split("/")
        if len(parts) == 3 and parts[1] in set(Role):
            return PeerIdentity(unquote(parts[0]), Role(parts[1]), unquote(parts[2]), int(shown["serialNumber"], 16))
    raise PeerRefused("the other end's certificate names no process of a run of Shoal")


@lru_cache(maxsize=16)
def _tls_context(authority: str, certificate: str, key: str, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a process is known by its certificate, wherever it runs
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.verify_flags |= NO_CHECK_TIME
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if server_side:
        context.num_tickets = 0
    context.load_verify_locations(cadata=authority)
    _load_own(context, certificate + key)
    return context


def _load_own(context: ssl.SSLContext, text: str) -> None:
    """Python's ssl reads a key from a path alone: one in memory, so that nothing reaches a disk."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile("w", prefix="shoal-") as file:  # mode 0600
            file.write(text)
            file.flush()
            context.load_cert_chain(file.name)


_known_lists: dict[str, tuple[tuple[int, int, int], frozenset[int]]] = {}


def _revoked_in(path: str) -> frozenset[int]:
    """Serial numbers of a run's list (one a line, hexadecimal, then whose it was), read again when the file changes."""
    if not path:
        return frozenset()
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise PeerRefused(f"the list of revoked certificates, {path}, cannot be read: {error.strerror}") from None
    stamp = (state.st_ino, state.st_mtime_ns, state.st_size)
    known = _known_lists.get(path)
    if known is None or known[0] != stamp:
        known = _known_lists[path] = (stamp, read_revoked(Path(path)))
    return known[1]


def read_revoked(path: Path) -> frozenset[int]:
    try:
        lines = path.read_text().splitlines()
        return frozenset(int(line.split()[0], 16) for line in lines if line.strip())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError):
        raise PeerRefused(f"the list of revoked certificates, {path}, cannot be read: nobody is accepted") from None
