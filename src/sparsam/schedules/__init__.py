"""When: which steps are sharpness-aware, and by which ascent.

Steps are counted from 0. A schedule holds settings, no state: its answer depends on the step alone.
Rho over time is in :mod:`sparsam.rho`.
"""

from sparsam.schedules.base import Schedule
from sparsam.schedules.every import EveryNth, EveryStep
from sparsam.schedules.last_steps import LastSteps

__all__ = ["EveryNth", "EveryStep", "LastSteps", "Schedule"]
