"""The `dlmrt` command, also as `python -m dlmrt`: Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        from dlmrt.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
