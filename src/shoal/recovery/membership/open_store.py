"""Opens the store that `--store` names."""

from pathlib import Path

from shoal.errors import InputError
from shoal.recovery.membership import etcd, sqlite_client
from shoal.recovery.membership.store import RunStore
from shoal.recovery.membership.store_access import StoreAccess, command_access


def open_store(address: str | None, folder: Path, run: str, access: StoreAccess | None = None) -> RunStore:
    """A client of the run's store. Without an address it is the embedded one in the run's folder. `access`: of a
    process of the run; without it, of a command."""
    if address is None:
        return sqlite_client.connect(folder, access or command_access(folder, run))
    if address.startswith(("etcd://", "etcds://")):
        return etcd.EtcdStore(address, run)
    raise InputError(
        f"{address!r} is no address of a store: a store is on this machine, or an etcd for several machines",
        fix=f"leave --store out, or --store {etcd.ADDRESS_FORM}",
    )
