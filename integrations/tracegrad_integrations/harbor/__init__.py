"""Harbor's agents and task format, as rollouts (`pip install "tracegrad[harbor]"`, Python 3.12).

Harbor counts its runs at its maker's, unless it is told not to before it is imported.
"""

from __future__ import annotations

import os
import sys

os.environ["HARBOR_TELEMETRY"] = "0"

if sys.version_info < (3, 12):
    raise ImportError("Harbor needs Python 3.12 or later; this is Python "
                      f"{sys.version_info[0]}.{sys.version_info[1]}")  # fmt: skip

# LiteLLM, which Harbor imports, would ask for a list of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
