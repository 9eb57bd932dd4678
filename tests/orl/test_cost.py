"""Cost of responses by hand, and properties of how they are dealt to ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.models.config import SlidingConfig
from dlmrt.testing import tiny_llada2, tiny_qwen3
from orl.cost import CostModel, active_weights, deal
from orl.packing import balance
