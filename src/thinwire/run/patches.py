"""The only places where thinwire changes PyTorch: group creation, DistributedDataParallel, GradScaler.

Group creation is wrapped where all ways lead to: ``init_process_group``, ``new_group``, device meshes, whatever they were
imported as. Scripts may ask for a group's backend: they are told the one that they named.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from ..collectives.endpoint import COLLECTIVES
from ..collectives.traffic import Message
from ..collectives.transport import Metered
from ..errors import PolicyError, UnsupportedError
from ..group import GroupOptions, ThinwireGroup
from ..integrate.ddp import compress_ddp
from ..policy import AXES, ByDtype, Policy
from .group_names import MEGATRON
from .report import Report, has_feedback, wants_feedback
from .settings import RunSettings

BACKEND = "thinwire-run"
_UNNAMED = ("undefined", "default_pg")
"""What PyTorch calls groups without a description."""


@dataclass(frozen=True)
class LaunchedOptions(GroupOptions):
    """Options of a group under ``thinwire run``. require_feedback: see :class:`RunSettings`."""

    require_feedback: bool = False


class LaunchedGroup(ThinwireGroup):
    """A thinwire group whose script does not know it. Made with LaunchedOptions."""

    def submit(
        self,
        message: Message,
        call: Callable[[Metered], None],
        result: Any,
        queue: str = COLLECTIVES,
        lane: int | None = None,
    ) -> dist.Work:
        options, policy = self.options, self.policy.axis(message.axis)
        strict = isinstance(options, LaunchedOptions) and options.require_feedback
        if strict and wants_feedback(policy, message) and not has_feedback(message):
            raise PolicyError(
                f"policy {self.policy.name}, axis {message.axis}: {message.op} of {message.nbytes} bytes as {message.codec} "
                "would go without the error feedback that the policy asks for: only DistributedDataParallel's gradients "
                "get it here. Leave out --require-feedback, or use a policy with feedback = false"
            )
        return super().submit(message, call, result, queue, lane)


def inner_backend(asked: str, has_cuda: bool) -> str:
    """The inner backend of a group that a script asked for by this name ("undefined": by none).

    Raises UnsupportedError for a backend that a thinwire group cannot stand on.
    """
    if asked == "undefined":
        return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    pairs = sorted(asked.split(",")) if ":" in asked else [asked]
    found = {
        ("gloo",): "gloo",
        ("nccl",): "nccl",
        ("cpu:gloo",): "gloo",
        ("cuda:nccl",): "nccl",
        ("cpu:gloo", "cuda:nccl"): "cpu:gloo,cuda:nccl",
    }.get(tuple(pairs))
    if found is None:
        raise UnsupportedError(
            f"the script asks for backend {asked!r}; thinwire run has groups over gloo, nccl or cpu:gloo,cuda:nccl"
        )
    if "nccl" in found and not has_cuda:
        raise UnsupportedError(f"the script asks for backend {asked!r}, and this machine has no CUDA device")
    return found


class LossScales:
    """The factor of the GradScaler that has scaled a loss last: the one whose backward pass runs. 1 without any."""

    def __init__(self) -> None:
        self._last: Callable[[], Any] = lambda: None

    def current(self) -> float:
        scaler = self._last()
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def install(self) -> None:
        original = GradScaler.scale

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            self._last = ref(scaler)
            return original(scaler, outputs)

        cast(Any, GradScaler).scale = scale


class Compression:
    """What a rank does to PyTorch before its script runs. Tells ``report`` what gets which codec."""

    def __init__(self, settings: RunSettings, policy: Policy, report: Report) -> None:
        self._report = report
        self._options = LaunchedOptions(
            policy=policy,
            axis_names={**MEGATRON, **settings.axes},
            feedback_by_caller=True,
            require_feedback=settings.require_feedback,
            lanes=settings.lanes,
        )
        self._scales = LossScales()

    def install(self) -> None:
        """Change PyTorch, for the rest of this process. Raises UnsupportedError for a version that has no such places."""
        self._scales.install()
        self._wrap_group_creation()
        self._wrap_ddp()

    def _wrap_group_creation(self) -> None:
        c10d: Any = distributed_c10d
        original = getattr(c10d, "_new_process_group_helper", None)
        parameters = inspect.signature(original).parameters if original is not None else {}
        options = next((name for name in ("backend_options", "pg_options") if name in parameters), None)
        if original is None or options is None or "backend" not in parameters:
            raise UnsupportedError(
                f"thinwire run does not know how PyTorch {torch.__version__} makes groups; it knows 2.11 to 2.13. In the "
                'script, init_process_group("thinwire", pg_options=thinwire.GroupOptions(...)) does without it'
            )
        signature = inspect.signature(original)

        @functools.wraps(original)
        def helper(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            asked = str(call.arguments["backend"])
            if asked.startswith("thinwire"):
                return original(*args, **kwargs)  # the script knows thinwire, and has options of its own
            if call.arguments.get(options) is not None:
                warnings.warn(
                    f"thinwire run: options of the script's {asked} group are not used: "
                    f"{type(call.arguments[options]).__name__}",
                    stacklevel=2,
                )
            inner = inner_backend(asked, torch.cuda.is_available())
            call.arguments["backend"] = c10d.Backend(BACKEND)
            call.arguments[options] = replace(self._options, backend=inner)
            group, store = original(*call.args, **call.kwargs)
            if isinstance(group, LaunchedGroup):
                self._check_axis(group)
                c10d._world.pg_map[group] = asked, store
                c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(asked)))
                self._report.group(group)
            return group, store

        c10d._new_process_group_helper = helper

    def _check_axis(self, group: LaunchedGroup) -> None:
        """A group of unknown meaning must not get the hard compression of data-parallel gradients unasked."""
        name = group.getGroupDesc()
        axis, short = group.axis(), name.removeprefix("mesh_")
        if name not in _UNNAMED and short not in AXES and short not in group.options.axis_names:
            raise PolicyError(
                f"group {name!r} of the script is of no known axis; say which with --axis {short}=AXIS, "
                f"AXIS one of {', '.join(AXES)}"
            )
        if group.policy.axis(axis).difference:
            raise PolicyError(
                f"policy {group.policy.name}, axis {axis} (group {name!r}): differences need the value that was sent last, "
                f"which thinwire run does not keep; use a policy with difference = false, or --axis {short}=dp"
            )

    def _wrap_ddp(self) -> None:
        original = DistributedDataParallel.__init__

        @functools.wraps(original)
        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            group: Any = model.process_group
            if isinstance(group, LaunchedGroup) and _has_codec(group):
                self._compress_at_first_forward(model, group)

        cast(Any, DistributedDataParallel).__init__ = init

    def _compress_at_first_forward(self, model: DistributedDataParallel, group: LaunchedGroup) -> None:
        """Not at once: a model takes one hook only, and the script may register its own until then."""

        def install(module: nn.Module, inputs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            handle.remove()
            own = cast(Any, model)._get_ddp_logging_data().get("comm_hook")
            if own:
                self._report.own_hook(group, own)
                return
            # With a scale, be it 1: a step that overflows is taken back, whoever finds it and skips it.
            compress_ddp(model, scale=self._scales.current)
            self._report.ddp(group, sum(p.numel() for p in model.parameters() if p.requires_grad))

        # Models may be compiled with what they run before their forward pass.
        handle = model.register_forward_pre_hook(cast(Any, torch.compiler.disable)(install))


def _has_codec(group: LaunchedGroup) -> bool:
    axis = group.policy.axis(group.axis("all_reduce"))
    plain = ByDtype()
    return any(table.get("all_reduce", plain) != plain for table in (axis.codecs, *axis.roles.values()))
