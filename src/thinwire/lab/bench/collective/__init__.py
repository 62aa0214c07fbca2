"""Collectives under several codecs, side by side with plain ``torch.distributed``, in the manner of nccl-tests.

cases: the ops and their conventions. plan: what to run. measure: each rank. rows: what comes of it. run: all together.
"""

from .cases import OPS
from .plan import Plan, contenders
from .rows import Row
from .run import describe, run

__all__ = ["OPS", "Plan", "Row", "contenders", "describe", "run"]
