"""`python -m dlmrt` is the `dlmrt` command."""

from dlmrt.cli import main

if __name__ == "__main__":
    main()
