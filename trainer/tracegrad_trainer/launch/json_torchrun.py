"""torch.distributed's launcher (torchrun), its own log as JSON lines: `python -m ... OPTIONS`."""

from __future__ import annotations

import logging

from torch.distributed.run import main as torchrun

from tracegrad.log_format import write_json_log

if __name__ == "__main__":
    write_json_log("launcher", level=logging.WARNING)
    torchrun()
