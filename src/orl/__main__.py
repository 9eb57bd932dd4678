"""`python -m orl` is the `orl` command."""

from orl.cli import main

if __name__ == "__main__":
    main()
