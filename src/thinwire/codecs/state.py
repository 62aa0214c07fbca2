"""What a stateful codec remembers of a stream of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CodecState(ABC):
    """A codec's memory of one stream of messages, at one of its ends: what ``encode`` and ``decode`` take as ``state``.

    Both ends begin with a new one (:meth:`~thinwire.codecs.Codec.new_state`) and see the same payloads in the same order;
    the two then remember the same. ``encode`` and ``decode`` change it.
    """

    id: int = 0
    """Of what is remembered: 1 to 65535, a function of it alone; 0: nothing yet."""
    needs: int = 0
    """The id that a decoder must have for the payload that was encoded last; 0: none. Frames hold it."""

    @abstractmethod
    def dump(self) -> dict[str, Any]:
        """What is remembered, of JSON's types, for checkpoints."""

    @abstractmethod
    def load(self, dumped: dict[str, Any]) -> None:
        """Remember what :meth:`dump` gave. Raises CheckpointError if it cannot be that."""
