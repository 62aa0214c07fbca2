"""netlab: hosts as network namespaces, joined by links of a known rate, and proof that they have it.

Read ``topology`` (what to emulate), ``network`` (how it is made), ``calibration`` (what it really carries).
``paced`` is the stand-in where there is no root, ``diagnosis`` tells which one a machine can have.
"""

from .calibration import Calibration, Sample, calibrate, check, wire_seconds
from .diagnosis import Finding, available, doctor
from .network import HostCounters, Network
from .paced import PacedNetwork, Pacer
from .rate import format_rate, parse_rate
from .topology import Topology

__all__ = [
    "Calibration",
    "Finding",
    "HostCounters",
    "Network",
    "PacedNetwork",
    "Pacer",
    "Sample",
    "Topology",
    "available",
    "calibrate",
    "check",
    "doctor",
    "format_rate",
    "parse_rate",
    "wire_seconds",
]
