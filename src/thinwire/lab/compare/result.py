"""From the ranks' tracks to ``result.json``."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import SpecError
from ..bench.record import command_line, environment, write_json
from ..cluster import Cluster, calibration_rows
from ..report import from_dict, parity_of
from ..report.schema import VERSION
from ..train.flops import parameter_count, step_flops
from .plan import Plan
from .rank import Track, message_totals
from .scheme import scheme

PARITY_BASELINES = ("none", "bf16")


def run_of(body: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """One object of ``runs``, from what rank 0 reported. Times are medians, bytes means over ranks and steps."""
    tracks: list[Track] = body["tracks"]
    world, steps = len(tracks), len(tracks[0].seconds)
    step_s = statistics.median(tracks[0].seconds)
    zero_s = statistics.median(body["zero_seconds"])
    totals = message_totals(tracks)
    raw: dict[str, float] = defaultdict(float)
    wire: dict[str, float] = defaultdict(float)
    encode_s = decode_s = wire_s = 0.0
    for message, entry in totals.items():
        raw[message.axis] += entry.raw_bytes / world / steps
        wire[message.axis] += entry.tally.wire_bytes / world / steps
        encode_s += entry.tally.encode_s
        decode_s += entry.tally.decode_s
        if (
            message.op != "recv"
        ):  # a stage that waits for its turn in the pipeline is not waiting for the wire
            wire_s += entry.tally.wire_s
    config = plan.config
    tx_bytes = [t.interface_bytes for t in tracks if t.interface_bytes is not None]
    return {
        "policy": body["policy"],
        "description": body["description"],
        "seed": body["seed"],
        "steps": config.steps,
        "timed_steps": steps,
        "samples_per_s": config.global_batch / step_s,
        "tflops_per_rank": step_flops(config.model, config.global_batch) / step_s / world / 1e12,
        "step_ms_median": 1e3 * step_s,
        "step_ms": [round(1e3 * s, 3) for s in tracks[0].seconds],
        "zero_comm_step_ms": 1e3 * zero_s,
        "comm_share": 1 - zero_s / step_s,
        "raw_bytes": dict(raw),
        "wire_bytes": dict(wire),
        "breakdown_ms": {
            "compute": 1e3 * zero_s,
            "encode": 1e3 * encode_s / world / steps,
            "wire": 1e3 * wire_s / world / steps,
            "decode": 1e3 * decode_s / world / steps,
            "wait": 1e3 * max(step_s - zero_s, 0.0),
        },
        "train_loss": tracks[0].train_loss,
        "val_loss": tracks[0].val_curve[-1][1],
        "val_curve": [list(point) for point in tracks[0].val_curve],
        "messages": [
            {
                "axis": message.axis,
                "op": message.op,
                "role": message.role,
                "dtype": message.dtype,
                "codec": message.codec,
                "nbytes": message.nbytes * entry.calls / world / steps,
                "count": entry.calls / world / steps,
                "seconds": entry.tally.wire_s / world / steps,
                "wire_nbytes": entry.tally.wire_bytes / world / steps,
            }
            for message, entry in totals.items()
        ],
        "interface_bytes": statistics.mean(tx_bytes) / steps if tx_bytes else None,
    }


class ResultFile:
    """``DIR/result.json`` as it grows: runs are added, or found done in an earlier start of the same comparison."""

    def __init__(self, path: Path, plan: Plan, cluster: Cluster) -> None:
        self._path = path
        config = plan.config
        model = config.model
        self.record: dict[str, Any] = {
            "version": VERSION,
            "environment": environment(),
            "command": command_line(),
            "layout": {
                **{a: getattr(config.layout, a) for a in ("dp", "tp", "pp")},
                **({"zero": config.zero} if config.degrees is None else {}),
            },
            "hosts": cluster.topology.hosts,
            "ranks": cluster.world,
            "link": cluster.link(),
            "calibration": calibration_rows(cluster.calibration),
            "model": {
                "preset": plan.preset,
                "parameters": parameter_count(model),
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "sequence": model.sequence,
                "vocabulary": model.vocab,
                "batch": config.global_batch,
                "micro_batches": config.micro_batches,
                "precision": config.precision,
            },
            "plan": json.loads(json.dumps(plan.identity())),
            "runs": [],
            "parity": [],
        }
        if path.exists():
            self._continue(json.loads(path.read_text()))

    def _continue(self, earlier: dict[str, Any]) -> None:
        for key in ("layout", "hosts", "link", "model", "plan"):
            mine = (
                {k: v for k, v in self.record[key].items() if k != "note"}
                if key == "link"
                else self.record[key]
            )
            found = earlier.get(key)
            theirs = {k: v for k, v in found.items() if k != "note"} if key == "link" and found else found
            if theirs != mine:
                raise SpecError(
                    f"{self._path} holds another comparison: {key} was {theirs}, is {mine}. Use another --out"
                )
        self.record["runs"] = earlier["runs"]
        self.record["command"] = earlier["command"]
        if self.record["command"] != command_line():
            self.record["command"] += "\n" + command_line()

    def todo(self, plan: Plan) -> dict[int, tuple[str, ...]]:
        """Seed -> policies that have no run yet."""
        done = {(run["policy"], run["seed"]) for run in self.record["runs"]}
        todo = {
            seed: tuple(p for p in plan.policies if (scheme(p).name, seed) not in done) for seed in plan.seeds
        }
        return {seed: names for seed, names in todo.items() if names}

    def add(self, run: dict[str, Any]) -> None:
        """Add a run and write the file."""
        self.record["runs"].append(run)
        self.write()

    def write(self) -> None:
        """Write the file, with the parity of every policy against the uncompressed baseline."""
        policies = list(dict.fromkeys(run["policy"] for run in self.record["runs"]))
        baseline = next((b for b in PARITY_BASELINES if b in policies), None)
        self.record["parity"] = []
        if baseline is not None:
            tests = parity_of(from_dict(self.record), baseline)
            self.record["parity"] = [dataclasses.asdict(test) for test in tests.values()]
        write_json(self._path, self.record)
