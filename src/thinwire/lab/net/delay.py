"""Added latency: whether the kernel can add it, and the relay process that does where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...errors import NetworkError
from . import namespace

_SCRIPT = Path(__file__).with_name("relay.py")
_START_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 3.0


def kernel_has_netem(prefix: str) -> bool:
    """Try netem in a namespace made for that (``prefix`` + "try"), which is removed again."""
    name = f"{prefix}try"
    namespace.command(["ip", "netns", "add", name])
    try:
        namespace.command(["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except NetworkError:
        return False
    finally:
        namespace.remove([name])
    return True


class Relay:
    """A process that makes ``device`` in ``netns`` and ``port`` in ``switch`` and carries frames between them.

    Frames from the device reach the port latency_s later; frames the other way pass at once. Both ends are
    TAP devices that live as long as the process, which ends with ``close`` or with this process. It runs at
    real-time priority where that is allowed: on a busy machine latency would else grow by time slices.
    Raises NetworkError when the devices cannot be made.
    """

    def __init__(self, netns: str, device: str, switch: str, port: str, latency_s: float) -> None:
        argv = [sys.executable, "-I", str(_SCRIPT), netns, device, switch, port, repr(latency_s)]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the owner's to handle
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline().strip() != "ready":
            self._process.wait(_START_TIMEOUT_S)
            lines = self._process.stderr.read().strip().splitlines()
            raise NetworkError(
                f"the latency relay did not start ({lines[-1] if lines else 'no message'}): this kernel has no "
                "netem, so added latency needs /dev/net/tun; set latency_s = 0 for bandwidth only"
            )

    def close(self) -> None:
        """End the process; its devices vanish with it."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
