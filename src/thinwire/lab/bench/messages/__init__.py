"""How far real training messages compress: captured from the reference trainer, measured by role and stage of training.

capture: training runs whose codec keeps what it sends. measure: entropies, ratios, errors, spectra. figures: PNGs.
"""

from .capture import PHASES, Capture, Role, capture
from .measure import Record, measure_roles, measure_spectra

__all__ = ["PHASES", "Capture", "Record", "Role", "capture", "measure_roles", "measure_spectra"]
