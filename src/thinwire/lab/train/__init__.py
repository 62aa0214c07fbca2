"""The reference trainer: GPT-NeoX under data, tensor and pipeline parallelism with sharded state.

It is the proof that thinwire's groups carry a real training step, and the yardstick for what compression costs
in loss. ``Trainer`` ties the files together; each of the others holds one thing.
"""

from .config import TrainConfig
from .layout import Layout
from .mesh import build_mesh
from .model import ModelConfig
from .trainer import StepRecord, Trainer

__all__ = ["Layout", "ModelConfig", "StepRecord", "TrainConfig", "Trainer", "build_mesh"]
