"""Every exception that thinwire raises on purpose.

::

    ThinwireError
    +-- SpecError          a codec, policy or preset that does not parse, or an unknown name
    +-- UnsupportedError   a combination that thinwire refuses: dtype, device, op, size
    +-- PolicyError        a policy that cannot be applied to what it was given
    +-- WireError          bytes that are not the frame they should be
    +-- MismatchError      ranks that disagree on policy, version, dtype or size
    +-- PeerError          a peer that was lost, or did not answer within the time-out
    +-- RankError          a rank process that died; holds its traceback
    +-- LayoutError        a layout that does not fit the ranks, the hosts or the model
    +-- DataError          training text that is missing, empty or too short
    +-- NetworkError       an emulated network that could not be made or is not what it claims
    +-- CheckpointError    a checkpoint that is missing, incomplete or of another run

The message gives the value that was found, the limit, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ThinwireError(Exception):
    """Base of all errors that thinwire raises on purpose."""


class SpecError(ThinwireError, ValueError):
    """A codec, policy or preset that does not parse, or an unknown name."""


class UnsupportedError(ThinwireError, TypeError):
    """A combination of dtype, device, op or size that thinwire refuses."""


class PolicyError(ThinwireError, ValueError):
    """A policy that cannot be applied to what it was given."""


class WireError(ThinwireError, ValueError):
    """Bytes that are not the frame they should be."""


class MismatchError(ThinwireError, RuntimeError):
    """Ranks that disagree on policy, version, dtype or size."""


class PeerError(ThinwireError, RuntimeError):
    """A peer that was lost, or did not answer within the time-out."""


class RankError(ThinwireError, RuntimeError):
    """A rank process that failed. ``rank`` is the first one, ``traceback`` its own text."""

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class LayoutError(ThinwireError, ValueError):
    """A layout that does not fit the ranks, the hosts or the model."""


class DataError(ThinwireError, ValueError):
    """Training text that is missing, empty or too short."""


class NetworkError(ThinwireError, RuntimeError):
    """An emulated network that could not be made, or is not what it claims to be."""


class CheckpointError(ThinwireError, RuntimeError):
    """A checkpoint that is missing, incomplete or of another run."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an "unknown name" message: the nearest known names, else all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + ", ".join(names)
