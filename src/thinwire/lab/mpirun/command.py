"""An ``mpirun`` and the arguments that it takes: Open MPI's and MPICH's have none in common."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import LayoutError, UnsupportedError
from ...launch import Place

JOB, SOCKET, STORE = "job", "ranks", "store"
"""Files in the folder of a run: what its processes do, where they are heard, and where they meet."""
_LIBRARIES = {"Open MPI": "libmpi.so.40", "MPICH": "libmpi.so.12"}


@dataclass(frozen=True)
class Mpirun:
    """path: of the program. kind: ``Open MPI`` or ``MPICH``. library: the one that belongs to it, None: where mpi4py looks
    first anyway."""

    path: str
    kind: str
    library: str | None = None

    @staticmethod
    def find(path: str | None = None) -> Mpirun:
        """The given one, else that of this Python environment, else the first on the path.

        Raises UnsupportedError where there is none, or one that is neither Open MPI's nor MPICH's.
        """
        own = Path(sys.prefix) / "bin" / "mpirun"
        found = path or (str(own) if own.exists() else shutil.which("mpirun"))
        if found is None or shutil.which(found) is None:
            raise UnsupportedError(
                f"no mpirun at {found or 'any place of the path'}; pip install 'thinwire[mpi]' installs Open MPI's"
            )
        found = str(Path(found).absolute())
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
        kind = "Open MPI" if "Open MPI" in told else "MPICH" if "HYDRA" in told.upper() else None
        if kind is None:
            first = (told.splitlines() or ["nothing"])[0]
            raise UnsupportedError(f"{found} --version says {first!r}: neither Open MPI nor MPICH")
        library = Path(found).parent.parent / "lib" / _LIBRARIES[kind]
        first_looked_at = Path(sys.prefix) / "lib"
        beside = library.exists() and library.parent.resolve() != first_looked_at.resolve()
        return Mpirun(found, kind, str(library) if beside else None)

    def command(self, world: int, program: Sequence[str], places: Sequence[Place], folder: Path) -> list[str]:
        """The command that runs ``program`` in ``world`` processes, on the hosts of ``places`` (none: here).

        Processes outnumber cores, so none is bound to one, and waiting ones yield. Between hosts there is TCP alone, over
        the emulated link. folder: for a script that stands for ssh, which starts mpirun itself, too.
        """
        end = ["-n", str(world), *program]
        if not places:
            return [self.path, *self._here(), *end]
        agent = _write_agent({p.address: str(p.netns) for p in places}, folder)
        mpirun = shlex.join([self.path, *self._there(places, agent), *end])
        return [str(agent), places[0].address, f"exec {mpirun}"]

    def environment(self) -> dict[str, str]:
        """Variables of the processes: which library mpi4py loads."""
        return {"MPI4PY_LIBMPI": self.library} if self.library is not None else {}

    def _here(self) -> list[str]:
        if self.kind == "MPICH":
            return []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Its own choice for non-blocking all-reduces, which pass through, takes twice the time of the blocking one.
        settings = {"mpi_yield_when_idle": "1", "coll_libnbc_iallreduce_algorithm": "1"}  # 1: a ring
        return [*root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *_each("--mca", settings)]

    def _there(self, places: Sequence[Place], agent: Path) -> list[str]:
        hosts: dict[str, int] = {}
        for place in places:
            if not place.address or place.netns is None:
                raise LayoutError("mpirun across hosts needs an emulated network, with an address for each")
            hosts[place.address] = hosts.get(place.address, 0) + 1
        interface = places[0].interface
        names = ",".join(f"{host}:{n}" for host, n in hosts.items())
        if self.kind == "MPICH":
            fabric = {
                "MPIR_CVAR_CH4_NETMOD": "ofi",
                "FI_PROVIDER": "tcp",
                "FI_TCP_IFACE": interface,
            }
            launch = ["-launcher", "ssh", "-launcher-exec", str(agent), "-iface", interface, "-hosts", names]
            return [*launch, *_each("-genv", fabric)]
        settings = {
            "pml": "ob1",
            "btl": "tcp,sm,self",
            "btl_tcp_if_include": interface,
            # Its own choice for blocking all-reduces, in levels, takes twice the time of a ring on four hosts of two ranks.
            "coll": "^han",
            "coll_tuned_use_dynamic_rules": "1",
            "coll_tuned_allreduce_algorithm": "4",  # a ring
        }
        return [
            *self._here(),
            *("--host", names),
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--prtemca", "prte_if_include", interface),
            *_each("--mca", settings),
        ]


def _each(flag: str, settings: Mapping[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (flag, name, value)]


def _write_agent(namespaces: dict[str, str], folder: Path) -> Path:
    """What mpirun takes for ssh: HOST COMMAND... runs the command in the network of the host, and under a name of its own:
    Open MPI takes all that have the same name for one host."""
    cases = "\n".join(f"  {address}) space={shlex.quote(name)} ;;" for address, name in namespaces.items())
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done  # options of ssh\n'
        'host="$1"; shift\n'
        f'case "$host" in\n{cases}\n'
        '  *) echo "no such host: $host" >&2; exit 1 ;;\nesac\n'
        'exec ip netns exec "$space" unshare --uts sh -c "echo $space > /proc/sys/kernel/hostname; $*"\n'
    )
    agent.chmod(0o700)
    return agent
