"""What ``thinwire run`` is told for its ranks, and how it reaches them: one argument of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class RunSettings:
    """How a rank runs a script.

    policy: a preset or a TOML file. axes: name of a mesh dimension, or description of a group -> axis.
    require_feedback: refuse lossy reductions without the error feedback that the policy asks for. lanes: of each group,
    as of :class:`~thinwire.GroupOptions`. log: file for JSON lines (None: no log); log_every: seconds between them (0:
    one at the end). module: the script is the name of a module.
    """

    policy: str
    axes: Mapping[str, str] = field(default_factory=dict)
    require_feedback: bool = False
    lanes: int | None = None
    log: str | None = None
    log_every: float = 0.0
    module: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RunSettings:
        return RunSettings(**json.loads(text))
