"""The variables that torchrun sets, so that any torch.distributed script finds its group."""

from collections.abc import Sequence

from shoal.driver.launchers.base import Host


def torchrun_environment(hosts: Sequence[Host], rank: int, address: str, port: int) -> dict[str, str]:
    """`hosts`: of each rank; ranks beyond them begin again at the first. `address`, `port`: of the rendezvous store."""
    names, (turn, place) = [host.name for host in hosts], divmod(rank, len(hosts))
    own, size = names[place], str(len(hosts))
    on_host, used = names.count(own), list(dict.fromkeys(names))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(turn * on_host + names[:place].count(own)),
        "GROUP_RANK": str(used.index(own)),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(on_host),
        "GROUP_WORLD_SIZE": str(len(used)),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
