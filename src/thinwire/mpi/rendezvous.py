"""``init_process_group("thinwire", init_method="mpi://")``: rank, size and where to meet, all told by MPI.

PyTorch needs a store beside the transport. Rank 0 keeps one, and MPI tells the others where.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from urllib.parse import parse_qsl, urlparse
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from ..errors import LayoutError, PeerError
from ..machine import network
from .library import check_launch
from .process import process

SCHEME = "mpi"
_TIMEOUT = timedelta(minutes=30)
_ONE_TRY = timedelta(seconds=5)
_TOKEN = "thinwire-token"


def register() -> None:
    """Make ``mpi://`` known to ``torch.distributed``; ``import thinwire`` does."""
    cast(Any, register_rendezvous_handler)(SCHEME, _rendezvous)


def meet_by_mpi(timeout: timedelta = _TIMEOUT) -> tuple[Any, int, int]:
    """(store, rank, size) of MPI_COMM_WORLD. Every process of the job calls it, none uses threads meanwhile.

    Raises MismatchError where launcher and library are of different MPIs, PeerError where rank 0 cannot be reached.
    """
    p = process()
    check_launch(p.mpi, os.environ)
    world = p.mpi.COMM_WORLD
    store: Any = None
    where: dict[str, Any] = {}
    if p.rank == 0:
        store = TCPStore("0.0.0.0", 0, p.size, is_master=True, timeout=timeout, wait_for_workers=False)
        where = {"port": store.port, "token": uuid4().hex, "network": network(), "addresses": _addresses()}
        store.set(_TOKEN, where["token"])
        p.store = store
    where = world.bcast(where)
    if p.rank > 0:
        store = _connected(where, p.size, timeout)
    return store, p.rank, p.size


def _rendezvous(url: str, timeout: timedelta = _TIMEOUT, **_: Any) -> Iterator[tuple[Any, int, int]]:
    store, rank, size = meet_by_mpi(timeout)
    given = dict(parse_qsl(urlparse(url).query))
    for name, mine in (("rank", rank), ("world_size", size)):
        if int(given.get(name, mine)) != mine:
            raise LayoutError(
                f"{name}={given[name]} was given, but MPI says {mine}; leave it out with mpi://"
            )
    yield store, rank, size
    raise LayoutError("mpi:// meets once; it cannot meet again after ranks have changed")


def _connected(where: dict[str, Any], size: int, timeout: timedelta) -> Any:
    """The store of rank 0, by the first of its addresses at which it answers."""
    addresses = ["127.0.0.1"] if where["network"] == network() else where["addresses"]
    tried = []
    for address in addresses:
        try:
            with socket.create_connection((address, where["port"]), _ONE_TRY.total_seconds()):
                pass
            store = TCPStore(
                address, where["port"], size, is_master=False, timeout=_ONE_TRY, wait_for_workers=False
            )
            if store.get(_TOKEN).decode() == where["token"]:
                store.set_timeout(timeout)
                return store
            tried.append(f"{address} (somebody else's store)")
        except (OSError, RuntimeError) as e:
            tried.append(f"{address} ({str(e).splitlines()[0]})")
    raise PeerError(
        f"the store that rank 0 keeps at port {where['port']} cannot be reached; tried {', '.join(tried) or 'no address'}. "
        "MPI's own network is not enough: PyTorch's store needs TCP between the hosts"
    )


def _addresses() -> list[str]:
    """This host's IPv4 addresses but for the loopback's, that of its name first."""
    found = []
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with suppress(ImportError):
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # SIOCGIFADDR: an interface without an address
                    answer = ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]
