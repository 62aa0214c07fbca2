"""Who knows what a message is tells the group: a group sees ops and sizes, not what the bytes mean."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from ..errors import UnsupportedError
from ..group import ROLE_TAGS, ThinwireGroup


def as_role(group: dist.ProcessGroup | None, role: str) -> AbstractContextManager[None]:
    """Inside, this thread's messages over ``group`` are of this role. Over other groups than thinwire's: nothing."""
    return group.role(role) if isinstance(group, ThinwireGroup) else nullcontext()


def role_tag(role: str) -> int:
    """The tag with which a send and its receive say their role. Raises UnsupportedError for a role without one."""
    for tag, name in ROLE_TAGS.items():
        if name == role:
            return tag
    raise UnsupportedError(f"role {role!r} has no tag; {', '.join(ROLE_TAGS.values())} have one")
