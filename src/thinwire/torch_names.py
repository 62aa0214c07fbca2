"""Names that differ between the PyTorch versions that thinwire runs on.

2.13 calls ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` by new names and warns about the old ones,
which are all that 2.11 has.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
