"""Damaged frames for every codec: ``scripts/fuzz`` runs a million, without and with bounds checking of the kernels.

    python bench/fuzz.py --cases 1000000

With NUMBA_BOUNDSCHECK=1 (and a NUMBA_CACHE_DIR of its own) every access of the kernels is checked.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

from thinwire.codecs import list_codecs, parse
from thinwire.testing import fuzz_codec

MORE = (
    "zfp:rate=3",
    "zfp:rate=8",
    "zfp:rate=16",
    "zfp:rate=32",
    "zfp:rate=64",
    "mpc:dim=32",
    "int4:block=32",
    "int8:block=4096",
    "fp8:e5m2,block=32",
    "mxfp8:e5m2",
    "topk:k=7,bits=2",
    "bounded:abs=0.1",
    "bounded:rel=0.01",
    "hadamard|int4",
    "int8|huffman",
    "int2|huffman",
    "hadamard|int4|huffman",
    "topk|huffman",
)
"""Beside every codec with its default parameters, if it has some."""
NO_DEFAULTS = ("zfp", "bounded")
MOST_GROWTH = 256 << 20
"""Bytes of memory; the largest frame here has 16 KiB."""


def main() -> None:
    """Fuzz every registered codec with its default parameters, and those that have others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="over all codecs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    specs = [*(parse(name) for name in list_codecs() if name not in NO_DEFAULTS), *map(parse, MORE)]
    checked = os.environ.get("NUMBA_BOUNDSCHECK") == "1"
    print(f"bounds checking of kernels: {'on' if checked else 'off'}")
    for codec in specs:
        fuzz_codec(codec, 100, arguments.seed)  # compiles
    start, used = time.monotonic(), memory()
    for codec in specs:
        found = fuzz_codec(codec, arguments.cases // len(specs), arguments.seed)
        print(f"{codec!s:40} accepted {found['accepted']:8d} refused {found['refused']:8d}", flush=True)
    growth = memory() - used
    print(f"{time.monotonic() - start:.0f} s, memory grew by {growth >> 20} MiB")
    if growth > MOST_GROWTH:
        raise SystemExit(f"memory grew by {growth} bytes: something is allocated that no frame declares")


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
