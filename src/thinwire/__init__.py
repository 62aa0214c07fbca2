"""thinwire: distributed training that sends fewer bytes.

One policy, a codec for each parallel axis, under training code that does not change. Follow one gradient:
:mod:`thinwire.codecs` (tensor to bytes), :mod:`thinwire.wire` (bytes to frame), :mod:`thinwire.collectives`
(frame to peers), :mod:`thinwire.group` (the drop-in process group), :mod:`thinwire.integrate` (PyTorch's seams).
"""

from .codecs import Codec, list_codecs, parse
from .collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce_scatter,
    send,
    traffic,
)
from .collectives.monitor import ErrorMonitor
from .collectives.options import CallOptions
from .errors import ThinwireError
from .group import GroupOptions, MessageStats, Stats, StatsLog, ThinwireGroup, register, stats
from .integrate.checkpoint import LoadedCompression, compression_state, load_compression
from .integrate.ddp import DdpCompression, compress_ddp
from .integrate.degrees import ShardingDegrees
from .integrate.fsdp import FsdpCompression, compress_fsdp
from .integrate.gradients import Bucket, GradientSync
from .integrate.ladder import Ladder
from .integrate.mesh import groups, init_mesh
from .integrate.sharded import ShardedModel
from .integrate.sharding import Sharding, list_shardings, sharding
from .mpi.rendezvous import register as _register_mpi
from .policy import AxisPolicy, Policy
from .presets import list_presets
from .presets import load as load_policy

register()
_register_mpi()

__version__ = "0.1.0"
__all__ = [
    "AxisPolicy",
    "Bucket",
    "CallOptions",
    "Codec",
    "DdpCompression",
    "ErrorMonitor",
    "FsdpCompression",
    "GradientSync",
    "GroupOptions",
    "Ladder",
    "LoadedCompression",
    "MessageStats",
    "Policy",
    "ShardedModel",
    "Sharding",
    "ShardingDegrees",
    "Stats",
    "StatsLog",
    "ThinwireError",
    "ThinwireGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "compress_ddp",
    "compress_fsdp",
    "compression_state",
    "groups",
    "init_mesh",
    "list_codecs",
    "list_presets",
    "list_shardings",
    "load_compression",
    "load_policy",
    "parse",
    "recv",
    "reduce_scatter",
    "send",
    "sharding",
    "stats",
    "traffic",
]
