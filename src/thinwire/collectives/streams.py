"""What stateful codecs remember: one state for each end of each stream of frames.

A stream is all frames of one kind (op, role, codec, dtype, numel) that one rank sends to one other, or to all. Its ends
see the same frames in the same order, so their states stay equal without a word about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs import parse
from ..codecs.base import Codec
from ..codecs.state import CodecState
from ..errors import CheckpointError, ThinwireError
from .traffic import Message

EVERYONE = -1
"""Receiver of the frames that are gathered or broadcast."""


class Streams:
    """The states at this rank's ends of all streams of one group. Empty at first."""

    def __init__(self) -> None:
        self._states: dict[str, CodecState] = {}

    def get(self, name: str, codec: Codec) -> CodecState | None:
        """The state at an end; made on first use. None: the codec is not stateful."""
        found = self._states.get(name)
        if found is None:
            found = codec.new_state()
            if found is not None:
                self._states[name] = found
        return found

    def dump(self) -> dict[str, Any]:
        """All states, of JSON's types, for a checkpoint."""
        return {name: s.dump() for name, s in sorted(self._states.items())}

    def load(self, dumped: Mapping[str, Any]) -> None:
        """Go on from what :meth:`dump` gave: on every rank of the group, or on none.

        Raises CheckpointError, and changes nothing, if it cannot be that.
        """
        loaded: dict[str, CodecState] = {}
        try:
            for name, entry in dumped.items():
                state = parse(name.split(" ")[0]).new_state()
                if state is None:
                    raise CheckpointError(f"{name}: this codec has no state")
                state.load(entry)
                loaded[name] = state
        except (ValueError, AttributeError, TypeError, ThinwireError) as e:
            raise CheckpointError(f"states of codecs: {e}") from e
        self._states = loaded


@dataclass(frozen=True)
class Ends:
    """The ends of the streams of one kind of message."""

    streams: Streams
    rank: int
    kind: str

    @staticmethod
    def of(streams: Streams, rank: int, message: Message) -> Ends:
        """Only what both ends of a stream know alike: of a message from peer to peer, the receiver may not know the role."""
        op = "send" if message.op == "recv" else message.op
        return Ends(streams, rank, op if op == "send" else f"{op} {message.role}")

    def sender(self, codec: Codec, numel: int, dtype: torch.dtype, to: int) -> CodecState | None:
        """What to encode numel values for rank ``to`` (or EVERYONE) with."""
        return self._get("encode", codec, numel, dtype, self.rank, to) if codec.stateful else None

    def receiver(
        self, codec: Codec, numel: int, dtype: torch.dtype, source: int, to: int
    ) -> CodecState | None:
        """What to decode numel values from rank ``source`` with. to: this rank, or EVERYONE."""
        return self._get("decode", codec, numel, dtype, source, to) if codec.stateful else None

    def _get(
        self, end: str, codec: Codec, numel: int, dtype: torch.dtype, source: int, to: int
    ) -> CodecState | None:
        receiver = "all" if to == EVERYONE else str(to)
        return self.streams.get(f"{codec} {dtype} {numel} {self.kind} {source}>{receiver} {end}", codec)
