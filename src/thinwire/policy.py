"""Which codec a message gets: (axis, op, role, dtype, size) -> codec. Presets, and TOML files.

::

    [axis.dp]
    reduce = "int4:block=128"          # all_reduce and reduce_scatter
    gather = "int8:block=128"          # all_gather
    feedback = true
    [axis.tp]
    all_reduce = { float32 = "zfp:rate=16", bfloat16 = "zfp:rate=12", float16 = "zfp:rate=12" }
    [axis.tp.role.activation_gradient]
    all_reduce = "bf16"
    [axis."dp@intra"]                  # inside of hosts, where [axis.dp] has algorithm = "hierarchical" or "auto"
    reduce = "int8:block=128"
    [axis.dp.monitor]                  # measure what encoding loses, see ErrorMonitor
    every = 50
    limit = 0.3
    action = "exact"

What an axis does not name travels uncompressed and is counted as such.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from . import toml_tables
from .codecs import Codec, Compressor, parse_compressor
from .codecs.none import NoneCodec
from .collectives.monitor import ErrorMonitor
from .collectives.options import Algorithm
from .collectives.topology import Topology
from .errors import PolicyError, SpecError, nearest
from .toml_tables import check_keys, checked_table

AXES = ("dp", "tp", "pp", "zero", "ep", "cp")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
ROLES = (
    "gradient",
    "activation",
    "activation_gradient",
    "parameter",
    "optimizer_state",
    "outer_gradient",
    "control",
    "unknown",
)
_GROUPS_OF_OPS = {
    "all": OPS,
    "reduce": ("all_reduce", "reduce_scatter"),
    "gather": ("all_gather",),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NONE = NoneCodec()


@dataclass(frozen=True)
class ByDtype:
    """A codec, or another compressor, for each dtype of the messages."""

    float32: Compressor = NONE
    bfloat16: Compressor = NONE
    float16: Compressor = NONE

    @staticmethod
    def of(spec: str | Compressor) -> ByDtype:
        """One codec for all dtypes, where it makes the message smaller; ``none`` where it cannot.

        A codec that shrinks no dtype at all is refused.
        """
        codec = parse_compressor(spec)
        chosen = {name: codec if shrinks(codec, dtype) else NONE for name, dtype in _DTYPES.items()}
        return ByDtype(**chosen)

    def get(self, dtype: torch.dtype) -> Compressor:
        return getattr(self, str(dtype).removeprefix("torch."), NONE)

    def codecs(self) -> tuple[Compressor, ...]:
        return tuple(getattr(self, name) for name in _DTYPES)

    def __str__(self) -> str:
        if self.float32 == self.bfloat16 == self.float16:
            return str(self.float32)
        return "{" + ", ".join(f"{n}={getattr(self, n)}" for n in _DTYPES) + "}"


def shrinks(codec: Compressor, dtype: torch.dtype) -> bool:
    """Whether a policy may name it for messages of this dtype: they get smaller, or it is ``none``."""
    return codec == NONE or codec.shrinks(dtype)


Codecs = Mapping[str, ByDtype]  # op -> codecs


@dataclass(frozen=True)
class AxisPolicy:
    """Codecs of one axis.

    codecs: by op. roles: overrides by role. feedback: error-feedback residuals for reduced gradients.
    difference: gathered parameters travel as the difference to what was sent last. min_nbytes: smaller
    messages pass through. algorithm: see :class:`~thinwire.collectives.options.CallOptions`. levels: overrides by level of
    the topology and op; without one, what travels inside of hosts has ``none``, all else the axis' codec.
    allow_without_feedback: accept codecs that need error feedback (topk, sign, lowrank) where there is none. monitor:
    of what encoding loses.
    """

    codecs: Codecs = field(default_factory=dict)
    roles: Mapping[str, Codecs] = field(default_factory=dict)
    feedback: bool = False
    difference: bool = False
    min_nbytes: int = 4096
    algorithm: Algorithm = "two_shot"
    levels: Mapping[str, Codecs] = field(default_factory=dict)
    allow_without_feedback: bool = False
    monitor: ErrorMonitor | None = None

    def __post_init__(self) -> None:
        if self.feedback and self.algorithm == "ring":
            raise SpecError(
                "feedback = true needs algorithm = two_shot: a ring encodes sums, which have no residual"
            )
        if self.levels and not self.by_level:
            raise SpecError(
                f"levels {', '.join(self.levels)} need algorithm = hierarchical or auto, found {self.algorithm}"
            )
        self._check_gradients_only()

    @property
    def by_level(self) -> bool:
        """Whether its calls need to know which ranks share a host."""
        return self.algorithm in ("hierarchical", "auto")

    def _check_gradients_only(self) -> None:
        """Raise SpecError if what is for reduced gradients, or stands only with their error feedback, is used elsewhere."""
        tables = [
            ("gradient", self.codecs),
            *self.roles.items(),
            *(("gradient", t) for t in self.levels.values()),
        ]
        for role, table in tables:
            for op, choice in table.items():
                reduced = role == "gradient" and op in _GROUPS_OF_OPS["reduce"]
                fed_back = self.allow_without_feedback or (self.feedback and reduced)
                for codec in choice.codecs():
                    if not reduced and not isinstance(codec, Codec):
                        raise SpecError(
                            f"{op} = {codec}: {codec.name} reduces the matrices of gradients; put it on reduce, all_reduce "
                            "or reduce_scatter of the axis (or of its role gradient), and a codec on the others"
                        )
                    if codec.needs_feedback and not fed_back:
                        raise SpecError(
                            f"{op} = {codec}: {codec.name} needs error feedback, which gradients get in all_reduce and "
                            "reduce_scatter with feedback = true; allow_without_feedback = true sends it all the same"
                        )

    def codec(
        self, op: str, role: str, dtype: torch.dtype, nbytes: int, topology: Topology | None = None
    ) -> Compressor:
        """The codec of a message; ``none`` if nothing is said about it, or if it is small or not of floats.

        topology: of the group; in levels, that of the outermost one on which anything is sent.
        """
        if not self._covers(dtype, nbytes):
            return NONE
        by_dtype = self.roles.get(role, {}).get(op) or self.codecs.get(op)
        if topology is not None and self.by_level:
            level = topology.outermost
            if self.algorithm == "hierarchical" and level == topology.levels[-1]:
                by_dtype = None
            by_dtype = self.levels.get(level, {}).get(op) or by_dtype
        return by_dtype.get(dtype) if by_dtype is not None else NONE

    def level_codecs(self, op: str, dtype: torch.dtype) -> tuple[tuple[str, Codec], ...]:
        """What the levels say of a message, as :class:`~thinwire.collectives.options.CallOptions` takes it."""
        said = [(level, table[op].get(dtype)) for level, table in sorted(self.levels.items()) if op in table]
        return tuple((level, codec) for level, codec in said if isinstance(codec, Codec))

    def check_levels(self, topology: Topology) -> None:
        """Raise PolicyError for a level that the topology does not have, and for codecs that no message would get."""
        for level, table in self.levels.items():
            if level not in topology.levels:
                raise PolicyError(
                    f"no level {level!r} in this group's topology; {nearest(level, topology.levels)}"
                )
            for op, choice in table.items():
                outermost = self.levels.get(topology.levels[0], {}).get(op) or self.codecs.get(op)
                if self.feedback and op in _GROUPS_OF_OPS["reduce"] and outermost is not None:
                    for inner, outer in zip(choice.codecs(), outermost.codecs(), strict=True):
                        if outer.lossless and not inner.lossless:
                            raise PolicyError(
                                f"level {level} has {inner} for {op}, level {topology.levels[0]} {outer}: there is no error "
                                "feedback where only inner levels lose anything; use feedback = false, or another codec"
                            )
                if choice != ByDtype() and outermost in (None, ByDtype()):
                    raise PolicyError(
                        f"level {level} has {choice} for {op}, level {topology.levels[0]} none: name a codec for it, too "
                        "(in levels, what is not compressed on the slowest one passes through)"
                    )

    def needs_role(self, op: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether the codec of such a message depends on its role."""
        return self._covers(dtype, nbytes) and any(op in table for table in self.roles.values())

    def _covers(self, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether a message is large enough and of floats: all others pass through."""
        return nbytes >= self.min_nbytes and dtype.is_floating_point

    def choices(self) -> list[ByDtype]:
        """What is said of any op and role."""
        return [
            choice
            for table in (self.codecs, *self.roles.values(), *self.levels.values())
            for choice in table.values()
        ]

    @property
    def compresses(self) -> bool:
        """Whether any message of this axis is compressed."""
        return any(choice != ByDtype() for choice in self.choices())


@dataclass(frozen=True)
class Policy:
    """A codec for each parallel axis. Frozen; equal policies have equal ``str``."""

    name: str
    axes: Mapping[str, AxisPolicy] = field(default_factory=dict)
    description: str = ""

    def axis(self, name: str) -> AxisPolicy:
        """The policy of an axis; the one that compresses nothing if the axis is not named."""
        return self.axes.get(name, _PLAIN)

    def __str__(self) -> str:
        """The canonical text that ranks compare with each other."""
        return f"{self.name} " + " ".join(f"{a}[{_text(p)}]" for a, p in sorted(self.axes.items()))

    def used_codecs(self) -> set[Compressor]:
        """Every codec or other compressor that some message may get."""
        return {c for policy in self.axes.values() for choice in policy.choices() for c in choice.codecs()}

    def without_feedback(self) -> Policy:
        """The same codecs, no residuals."""
        axes = {a: dataclasses.replace(p, feedback=False) for a, p in self.axes.items()}
        return dataclasses.replace(self, name=f"{self.name}-nofeedback", axes=axes)

    def monitored(self, monitor: ErrorMonitor | None, *axes: str) -> Policy:
        """The same codecs with an error monitor on these axes (none given: on all that the policy names).

        Raises PolicyError for an axis that the policy does not name: it loses nothing.
        """
        for axis in axes:
            if axis not in self.axes:
                raise PolicyError(
                    f"policy {self.name}: axis {axis!r} has no codec to monitor; named are {', '.join(self.axes) or 'none'}"
                )
        changed = {
            name: dataclasses.replace(p, monitor=monitor) if not axes or name in axes else p
            for name, p in self.axes.items()
        }
        return dataclasses.replace(self, axes=changed)


_PLAIN = AxisPolicy()


def _text(p: AxisPolicy) -> str:
    tables = {"": p.codecs, **{f"role.{r}.": c for r, c in p.roles.items()}}
    tables |= {f"@{level}.": c for level, c in p.levels.items()}
    codecs = [f"{prefix}{op}={c}" for prefix, table in tables.items() for op, c in sorted(table.items())]
    rest = f"feedback={p.feedback},difference={p.difference},min={p.min_nbytes},{p.algorithm}"
    monitor = [] if p.monitor is None else [f"monitor({p.monitor})"]
    return ",".join([*codecs, rest, *monitor])


def from_toml(path: Path) -> Policy:
    """Read a policy file. Raises SpecError with the file's name and the key that is wrong."""
    table = toml_tables.read(path, "policy file")
    try:
        return from_dict(table, name=path.stem)
    except SpecError as e:
        raise SpecError(f"policy file {path}: {e}") from None


def from_dict(table: Mapping[str, Any], name: str) -> Policy:
    """A policy from the tables of a TOML file. Unknown keys are errors."""
    check_keys(table, ("name", "description", "axis"), "policy")
    axes = table.get("axis", {})
    check_keys({axis.partition("@")[0]: None for axis in checked_table(axes, "axis")}, AXES, "axis")
    names = dict.fromkeys(axis.partition("@")[0] for axis in axes)
    return Policy(
        name=str(table.get("name", name)),
        axes={axis: _axis(axis, axes.get(axis, {}), _levels(axis, axes)) for axis in names},
        description=str(table.get("description", "")),
    )


_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "feedback": lambda v: isinstance(v, bool),
    "difference": lambda v: isinstance(v, bool),
    "allow_without_feedback": lambda v: isinstance(v, bool),
    "min_nbytes": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    "algorithm": lambda v: v in get_args(Algorithm),
}


def _levels(axis: str, axes: Mapping[str, Any]) -> dict[str, Codecs]:
    """Level -> codecs, of the tables ``AXIS@LEVEL``."""
    levels: dict[str, Codecs] = {}
    for name, entries in axes.items():
        own, at, level = name.partition("@")
        if own == axis and at:
            if not level:
                raise SpecError(f"axis.{name!r}: a level's name must follow the @, for instance {axis}@inter")
            check_keys(entries, (*OPS, *_GROUPS_OF_OPS), f"axis.{name}")
            levels[level] = _codecs(f"axis.{name}", entries)
    return levels


def _axis(axis: str, entries: Mapping[str, Any], levels: Mapping[str, Codecs]) -> AxisPolicy:
    check_keys(entries, (*OPS, *_GROUPS_OF_OPS, *_SETTINGS, "role", "monitor"), f"axis.{axis}")
    settings = {key: entries[key] for key in _SETTINGS if key in entries}
    if levels:
        settings.setdefault("algorithm", "hierarchical")
    for key, value in settings.items():
        if not _SETTINGS[key](value):
            raise SpecError(f"axis.{axis}.{key}: {value!r} is not a value for it")
    roles = entries.get("role", {})
    check_keys(roles, ROLES, f"axis.{axis}.role")
    for role, table in roles.items():
        check_keys(table, (*OPS, *_GROUPS_OF_OPS), f"axis.{axis}.role.{role}")
    codecs = _codecs(f"axis.{axis}", entries)
    by_role = {role: _codecs(f"axis.{axis}.role.{role}", table) for role, table in roles.items()}
    try:
        return AxisPolicy(
            codecs=codecs, roles=by_role, levels=levels, monitor=_monitor(axis, entries), **settings
        )
    except SpecError as e:
        raise SpecError(f"axis.{axis}: {e}") from None


def _monitor(axis: str, entries: Mapping[str, Any]) -> ErrorMonitor | None:
    if "monitor" not in entries:
        return None
    where, table = f"axis.{axis}.monitor", entries["monitor"]
    check_keys(table, [f.name for f in dataclasses.fields(ErrorMonitor)], where)
    try:
        return ErrorMonitor(**table)
    except SpecError as e:
        raise SpecError(f"{where}: {e}") from None


def _codecs(where: str, entries: Mapping[str, Any]) -> Codecs:
    """Op -> codecs; an op's own entry wins over ``reduce`` and ``gather``, these over ``all``."""
    codecs: dict[str, ByDtype] = {}
    for key, ops in (*_GROUPS_OF_OPS.items(), *((op, (op,)) for op in OPS)):
        if key in entries:
            choice = _choice(f"{where}.{key}", entries[key])
            codecs.update(dict.fromkeys(ops, choice))
    return codecs


def _choice(where: str, value: Any) -> ByDtype:
    try:
        if isinstance(value, str):
            codec = parse_compressor(value)
            if not any(shrinks(codec, dtype) for dtype in _DTYPES.values()):
                raise PolicyError(f"{value} makes no message smaller; use none")
            return ByDtype.of(codec)
        if isinstance(value, Mapping):
            check_keys(value, _DTYPES, where)
            codecs = {name: parse_compressor(spec) for name, spec in value.items()}
            for name, codec in codecs.items():
                if _DTYPES[name] not in codec.dtypes:
                    raise PolicyError(codec.dtype_message(_DTYPES[name]))
                if not shrinks(codec, _DTYPES[name]):
                    raise PolicyError(f"{codec} does not make a {name} message smaller; use none")
            return ByDtype(**codecs)
    except (SpecError, PolicyError) as e:
        raise SpecError(f"{where}: {e}") from None
    raise SpecError(f"{where}: {value!r} is neither a codec nor a table of dtype = codec")
