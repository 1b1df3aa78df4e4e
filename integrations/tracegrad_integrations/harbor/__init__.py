"""Harbor's agents and task format, as rollouts (`pip install "tracegrad[harbor]"`, Python 3.12).

Harbor counts its runs at its maker's, unless it is told not to before it is imported; LiteLLM,
which it imports, would ask for a list of prices.
"""

from __future__ import annotations

import os

os.environ["HARBOR_TELEMETRY"] = "0"
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
