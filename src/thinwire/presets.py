"""The named policies: those of arXiv 2409.02423, section 4, and thinwire's own ``lossless`` and ``balanced``.

The paper compresses inside MPI collectives, which re-encode on every hop of a ring; its schemes do so here
too (``algorithm = "ring"``). Its rates are bits per value of fp32 messages. The 16-bit form of ``zfp:R`` is
rate 8 for R <= 8 and rate 12 above, where 16 or more bits per value would not make the message smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import SpecError, nearest
from .policy import Policy, from_dict, from_toml

_Tables = Mapping[str, Mapping[str, Any]]
_MODEL_AXES = ("tp", "pp", "zero", "ep", "cp")


def zfp(rate: int) -> dict[str, str]:
    """The zfp codec of a rate in bits per fp32 value, and its 16-bit form."""
    half = f"zfp:rate={8 if rate <= 8 else 12}"
    return {"float32": f"zfp:rate={rate}", "bfloat16": half, "float16": half}


def _everywhere(codec: Any, **settings: Any) -> _Tables:
    return {axis: {"all": codec, **settings} for axis in ("dp", *_MODEL_AXES)}


def _hybrid(model: Any, gradient_rate: int) -> _Tables:
    ring = {"algorithm": "ring"}
    axes: dict[str, Mapping[str, Any]] = {axis: {"all": model, **ring} for axis in _MODEL_AXES}
    return {"dp": {"reduce": zfp(gradient_rate), "gather": model, **ring}, **axes}


def _none() -> _Tables:
    return {}


def _bf16() -> _Tables:
    return _everywhere("bf16")


def _naive_mpc() -> _Tables:
    return _everywhere("mpc:dim=1", algorithm="ring")


def _naive_zfp(rate: int) -> _Tables:
    return _everywhere(zfp(rate), algorithm="ring")


def _mzhybrid(rate: int = 8) -> _Tables:
    return _hybrid("mpc:dim=1", rate)


def _zhybrid(rate: int = 16) -> _Tables:
    return _hybrid(zfp(rate), 8)


# A message of 16 KiB is on the wire about as long as the extra change of threads takes: smaller ones go as they are.
_MIN_NBYTES = 16 << 10


def _lossless() -> _Tables:
    return _everywhere("exponent", min_nbytes=_MIN_NBYTES)


def _balanced() -> _Tables:
    small = {"min_nbytes": _MIN_NBYTES}
    return {
        "dp": {"reduce": "int4:block=128", "gather": "int8:block=128", "feedback": True, **small},
        "zero": {"gather": "int4:block=128", "difference": True, **small},
        "pp": {"send": "int8:block=128", **small},
    }


_PRESETS: dict[str, tuple[Callable[..., _Tables], str, int | None]] = {
    # name: (tables, what it is, default rate or None if it takes none; 0: a rate must be given)
    "none": (_none, "nothing is compressed", None),
    "bf16": (_bf16, "every fp32 message travels as bf16", None),
    "naive-mpc": (_naive_mpc, "MPC (lossless) on everything", None),
    "naive-zfp": (_naive_zfp, "ZFP at one rate on everything", 0),
    "mzhybrid": (_mzhybrid, "MPC for tp, pp and sharded state; ZFP at a low rate for gradients", 8),
    "zhybrid": (_zhybrid, "ZFP at a high rate for tp, pp and sharded state; at rate 8 for gradients", 16),
    "lossless": (_lossless, "every message keeps all bits, exponents in a Huffman code", None),
    "balanced": (
        _balanced,
        "int4 with error feedback for gradients, int4 differences for parameters, int8 between stages, tp as it is",
        None,
    ),
}


def list_presets() -> dict[str, str]:
    """Name and one line of description of every preset."""
    return {name: text for name, (_, text, _) in _PRESETS.items()}


def preset(spec: str) -> Policy:
    """The preset of a name, or ``NAME:RATE`` where it takes a rate in bits per fp32 value (4 to 31)."""
    name, colon, argument = spec.partition(":")
    if name not in _PRESETS:
        raise SpecError(f"unknown policy {spec!r}; {nearest(name, _PRESETS)} A file's name must end in .toml")
    make, description, default = _PRESETS[name]
    if default is None:
        if colon:
            raise SpecError(f"policy {spec!r}: {name} takes no rate")
        return from_dict({"axis": make(), "description": description}, spec)
    if not colon and default == 0:
        raise SpecError(f"policy {spec!r} needs a rate in bits per value, for instance {name}:8 or {name}:16")
    if colon and not (argument.isdigit() and 4 <= int(argument) <= 31):
        raise SpecError(
            f"policy {spec!r}: the rate is a whole number of bits from 4 to 31, found {argument!r}"
        )
    rate = int(argument) if colon else default
    return from_dict({"axis": make(rate), "description": description}, spec)


def load(spec: str | Path | Policy) -> Policy:
    """A policy by preset name (``balanced``, ``naive-zfp:8``), or from a TOML file (a path that ends in .toml).

    Raises SpecError for an unknown name (the nearest are offered) and for a file that does not parse.
    """
    if isinstance(spec, Policy):
        return spec
    return from_toml(Path(spec)) if str(spec).endswith(".toml") else preset(str(spec))
