"""Memory that the ranks of one host share: what they add up among themselves is copied once, and goes through no socket.

Every rank has a region that it writes and its mates read; that there is something to read, or that it has been read, they
tell each other in messages of a byte. A region is a file in /dev/shm without a name: it is gone with its last process.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .pairwise import Pairwise
from .transport import Exchange, Transport

_log = logging.getLogger("thinwire")
_FOLDER, _PREFIX = "/dev/shm", "thinwire-"
_NAME_NBYTES = 64
_of_transport: WeakKeyDictionary[Transport, dict[tuple[int, ...], HostMemory]] = WeakKeyDictionary()


class HostMemory:
    """The regions of the ranks of a host, this one's among them, as one of them sees them. Grows with the messages."""

    def __init__(self, mates: Sequence[int]) -> None:
        self._mates = mates  # without this rank
        self._capacity = -1
        self._regions: dict[int, Tensor] | None = {}

    def open(self, x: Tensor, me: int, pairwise: Pairwise) -> dict[int, Tensor] | None:
        """Rank -> its region, as values like x; None: these ranks cannot share memory, which all of them find alike.

        All mates call it with the same size, in the same order as their other calls.
        """
        if self._regions is not None and x.nbytes > self._capacity:
            self._capacity = 1 << (x.nbytes - 1).bit_length()
            self._regions = self._opened(me, pairwise)
            if self._regions is None:
                _log.warning(
                    "rank %d: ranks %s of its host cannot share %d bytes of memory in %s (not a tmpfs of all of them, or "
                    "full); from now on their messages go through sockets, which is slower, with the same result",
                    *(me, sorted([me, *self._mates]), self._capacity, _FOLDER),
                )
        if self._regions is None:
            return None
        return {rank: region[: x.nbytes].view(x.dtype) for rank, region in self._regions.items()}

    def tell(self, pairwise: Pairwise) -> Exchange:
        """Let the mates know that this rank is done with something; waiting means that they are, too."""
        word = torch.ones(1, dtype=torch.uint8)
        heard = [(mate, torch.empty(1, dtype=torch.uint8)) for mate in self._mates]
        return pairwise.start([(mate, word) for mate in self._mates], heard)

    def _opened(self, me: int, pairwise: Pairwise) -> dict[int, Tensor] | None:
        path = ""
        regions: dict[int, Tensor] = {}
        try:
            with suppress(OSError):
                fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=_FOLDER)
                os.truncate(fd, self._capacity)
                regions[me] = self._mapped(fd)
            names = self._exchange(os.path.basename(path).encode().ljust(_NAME_NBYTES), pairwise)
            for mate, name in names.items():
                with suppress(OSError, ValueError):
                    regions[mate] = self._mapped(os.open(_checked(name), os.O_RDWR | os.O_NOFOLLOW))
            able = bytes([len(regions) == len(self._mates) + 1])
            every = [able, *self._exchange(able, pairwise).values()]
        finally:
            if path:
                os.unlink(path)
        return regions if all(word == b"\1" for word in every) else None

    def _mapped(self, fd: int) -> Tensor:
        try:
            return torch.frombuffer(mmap.mmap(fd, self._capacity), dtype=torch.uint8)
        finally:
            os.close(fd)

    def _exchange(self, mine: bytes, pairwise: Pairwise) -> dict[int, bytes]:
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        got = {mate: torch.empty_like(sent) for mate in self._mates}
        pairwise.start([(mate, sent) for mate in self._mates], list(got.items())).wait()
        return {mate: bytes(word.tolist()) for mate, word in got.items()}


def _checked(name: bytes) -> str:
    """The path of a mate's region. Raises ValueError for what is none: a peer does not choose the files that are opened."""
    text = name.decode().rstrip()
    if not text.startswith(_PREFIX) or "/" in text:
        raise ValueError(f"{text!r} is not the name of a region")
    return os.path.join(_FOLDER, text)


def of(transport: Transport, mates: Sequence[int]) -> HostMemory:
    """The memory of this rank and its mates for the calls over a transport; made on first use."""
    by_mates = _of_transport.setdefault(transport, {})
    return by_mates.setdefault(tuple(mates), HostMemory(mates))
