"""Files with secrets: mode 0600, written whole, and refused if others can read them. Only the standard library."""

import os
import stat
from pathlib import Path

from shoal.errors import InputError

KEYS = "keys"  # in a run's folder
SERVERS_KEY, MANIFEST_KEY = "servers.key", "manifest.key"  # secrets there; key_folder.py has the others
FEWEST_CHARACTERS = 32  # of a shared secret: anyone who can connect may try guesses at home


def write_secret(path: Path, text: str) -> None:
    """Readers see the old file or the new one, and nobody else sees either."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Raises InputError where somebody else has put something at this place: the secrets would be theirs."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found, owners = path.lstat(), (os.geteuid(), path.parent.stat().st_uid)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
        what = "is a link" if stat.S_ISLNK(found.st_mode) else f"is user {found.st_uid}'s"
        raise InputError(
            f"{path} {what}, and secrets of user {os.geteuid()} are to be kept there",
            fix=f"look who put it there; rm -r {path}, or another folder for the run",
        )
    os.chmod(path, 0o700)


def read_secret(path: Path, what: str) -> str:
    """The text of a file that only its owner can read. `what` says in errors what the file should hold."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise InputError(
                    f"{path} ({what}) has mode {mode:04o}: others can read or change it", fix=f"chmod 600 {path}"
                )
            return file.read(1 << 20).decode()
    except OSError as error:
        raise InputError(f"{path} ({what}) cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not {what}: it is no text") from None


def read_shared_secret(path: Path) -> str:
    """The secret that all hosts have a copy of, as `shoal keys new` makes it."""
    return checked_secret(read_secret(path, "the shared secret").strip(), str(path))


def checked_secret(secret: str, source: str) -> str:
    if len(secret) < FEWEST_CHARACTERS:
        raise InputError(
            f"the secret of {source} has {len(secret)} characters; it needs {FEWEST_CHARACTERS} or more, by chance",
            fix="shoal keys new FILE   makes one",
        )
    return secret


def kept_secret(file: Path, *, make: bool) -> str:
    """A secret of a run's folder `keys`; empty: it has none, and `make` is not asked for."""
    if make and not file.exists():
        make_private_folder(file.parent)
        write_secret(file, os.urandom(32).hex() + "\n")
    return read_secret(file, "a secret of the run").strip() if file.exists() else ""
