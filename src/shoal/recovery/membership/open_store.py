"""Which store a run has: what `--store` may say."""

from pathlib import Path

from shoal.errors import InputError
from shoal.recovery.membership import etcd, sqlite_client
from shoal.recovery.membership.store import RunStore


def open_store(address: str | None, folder: Path, run: str) -> RunStore:
    """A client of the run's store; None: the embedded one in the run's folder, which embedded.start starts."""
    if address is None:
        return sqlite_client.connect(folder)
    if address.startswith(("etcd://", "etcds://")):
        return etcd.EtcdStore(address, run)
    raise InputError(
        f"there is no store at {address!r}: it is on this machine, or an etcd for several",
        fix=f"leave --store out, or --store {etcd.ADDRESS_FORM}",
    )
