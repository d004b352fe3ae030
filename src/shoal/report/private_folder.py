"""Run folders that only their owner can read: mode 0700, and 0600 for whatever anybody writes into them.

A default access list of the folder does the second part, in the kernel. So the umask of the user's own processes stays
as it is: a script's files elsewhere have the modes that the user wants. On file systems without such lists the folder's
mode protects the files, and their own modes are set when the run ends.
"""

import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

DEFAULT_LIST = "system.posix_acl_default"
_VERSION, _NOBODY = 2, 0xFFFFFFFF
_OWNER, _GROUP, _OTHERS = 0x01, 0x04, 0x20  # tags of the entries
_ALL, _NOTHING = 7, 0
OWNER_ONLY = struct.pack("<I", _VERSION) + b"".join(
    struct.pack("<HHI", tag, permitted, _NOBODY)
    for tag, permitted in ((_OWNER, _ALL), (_GROUP, _NOTHING), (_OTHERS, _NOTHING))
)


def make_private(folder: Path) -> None:
    """For a new folder. Raises OSError if the folder is not this user's."""
    os.chmod(folder, 0o700)
    with suppress(OSError, AttributeError):  # not every file system has access lists
        os.setxattr(folder, DEFAULT_LIST, OWNER_ONLY)


def set_modes(folder: Path) -> None:
    """At the end of a run: the modes of all files, where the kernel did not set them and the folder is private."""
    try:
        if stat.S_IMODE(folder.stat().st_mode) != 0o700 or _has_default_list(folder):
            return
    except OSError:
        return
    for parent, folders, files in os.walk(folder):
        for name, mode in [*((name, 0o700) for name in folders), *((name, 0o600) for name in files)]:
            path = os.path.join(parent, name)
            with suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, mode)


def _has_default_list(folder: Path) -> bool:
    try:
        return DEFAULT_LIST in os.listxattr(folder)
    except (OSError, AttributeError):
        return False
