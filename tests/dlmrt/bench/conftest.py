"""The benchmark scripts import each other by name, as a script's folder is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

sys.path.insert(0, str(ROOT / "benchmarks"))
