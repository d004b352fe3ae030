"""LabLauncher: workers on the hosts of a lab, started through the fork server and moved to their hosts."""

from collections.abc import Sequence

from shoal.driver.launchers.base import Host
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.launchers.namespaces import enter


class LabLauncher(LocalLauncher):
    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab

    def hosts(self, processes: int) -> Sequence[Host]:
        return self.lab.rank_hosts(processes)

    def services(self) -> Host:
        return self.lab.rank_hosts(1)[0]

    def enter_host(self, name: str) -> None:
        enter(next(host for host in self.lab.hosts if host.name == name))
