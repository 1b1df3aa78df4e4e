"""`trainer`, and `python -m tracegrad_trainer`."""

from __future__ import annotations

import signal

from tracegrad.cli.missing_dependency import naming_the_extra, print_version_if_asked


def main() -> None:
    # Ctrl-C during the second of imports, when nothing runs yet, ends us without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print_version_if_asked()
    with naming_the_extra("trainer", "trainer"):
        from tracegrad_trainer.cli.app import main as run

        run()


if __name__ == "__main__":
    main()
