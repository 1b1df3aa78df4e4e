"""The examples are no part of the distribution: their folder has to be named."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
