"""`shoal keys`: the secret that hosts share, and who has certificates of a run. It never shows a key."""

import argparse
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import run_argument
from shoal.cli.parser import CommandParser, command, print_json
from shoal.errors import InputError
from shoal.report.run_folder import RunFolder, find_run
from shoal.transport.secret_files import KEYS, write_secret

if TYPE_CHECKING:
    from shoal.transport.key_folder import IssuedCertificate, KeyFolder

EXAMPLE = "shoal keys show 7f3a"
SECRET_BYTES = 32


def arguments(parser: CommandParser) -> None:
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", dest="part", parser_class=CommandParser)

    text = "makes a secret for hosts to share (mode 0600), by which processes of torchrun know each other"
    new = command(parts, "new", text, call_new, "shoal keys new ~/.shoal-secret")
    new.add_argument("file", type=Path, metavar="FILE", help="where to write it; it must not be there yet")

    text = "who has certificates of a run: role, serial number, until when, revoked or not"
    run_argument(command(parts, "show", text, call_show, EXAMPLE))

    text = "a new authority for the next start of a run: all its certificates of before are refused then"
    run_argument(command(parts, "rotate", text, call_rotate, "shoal keys rotate 7f3a"))

    text = "certificates of a process that nobody in the run accepts any more, from the next connection on"
    revoke = command(parts, "revoke", text, call_revoke, "shoal keys revoke 7f3a worker-0.1")
    revoke.add_argument("run", help="a folder or the beginning of an id")
    revoke.add_argument(
        "name", metavar="NAME", help="as `shoal keys show` has it (worker-0: every worker-0.N); or a serial"
    )
    revoke.add_argument("--json", action="store_true", help="print the result as JSON")


def call(given: argparse.Namespace) -> int:
    raise InputError("shoal keys: new, show, rotate or revoke?", fix=EXAMPLE)


def call_new(given: argparse.Namespace) -> int:
    path: Path = given.file.expanduser()
    if path.exists():
        raise InputError(f"{path} is there already, and processes may use it", fix="another name, or remove it first")
    try:
        write_secret(path, secrets.token_urlsafe(SECRET_BYTES) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    print(f"wrote {path} (mode 0600)     copy it to every host, then: SHOAL_SECRET_FILE={path} torchrun …")
    return 0


def call_show(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    keys = _keys(folder)
    rows = _rows(keys, keys.issued())
    if given.json:
        print_json({"run": folder.id, "authority": keys.has_authority, "next": keys.is_rotated, "certificates": rows})
        return 0
    if not keys.has_authority:
        print(f"run {folder.id} has no certificates: it ran on one host, where sockets of this user need none")
        return 0
    now = time.time()
    counts = f"{len(rows)} certificate" + ("s" if len(rows) != 1 else "")
    print(f"run {folder.id}   {counts}" + ("   the next start has a new authority" if keys.is_rotated else ""))
    width = max([len("process"), *(len(row["process"]) for row in rows)])
    print(f"  {'process':{width}}  {'role':7}  {'serial':16}  valid until")
    for row in rows:
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(row["valid_until"]))
        state = "  revoked" if row["revoked"] else "  expired" if row["valid_until"] < now else ""
        print(f"  {row['process']:{width}}  {row['role']:7}  {row['serial']:16}  {until}{state}")
    return 0


def call_rotate(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    _keys(folder).rotate()
    if given.json:
        print_json({"run": folder.id, "next": True})
    else:
        print(
            f"{folder.id} has a new authority from its next start on; its certificates of before are refused then. "
            "Processes that run now keep theirs"
        )
    return 0


def call_revoke(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    keys = _keys(folder)
    rows = _rows(keys, keys.revoke(given.name))
    if given.json:
        print_json({"run": folder.id, "revoked": rows})
    else:
        for row in rows:
            print(f"{folder.id}: revoked {row['process']}, serial {row['serial']}")
        print("refused from the next connection on; one that is open stays open until the process ends")
    return 0


def _keys(folder: RunFolder) -> "KeyFolder":
    from shoal.transport.key_folder import KeyFolder  # `cryptography` takes a while

    return KeyFolder(folder.path / KEYS, folder.id)


def _rows(keys: "KeyFolder", certificates: "list[IssuedCertificate]") -> list[dict[str, Any]]:
    revoked = keys.revoked
    return [
        {
            "process": each.process,
            "role": str(each.role),
            "serial": f"{each.serial:x}",
            "valid_from": each.valid_from,
            "valid_until": each.valid_until,
            "revoked": each.serial in revoked,
        }
        for each in certificates
    ]
