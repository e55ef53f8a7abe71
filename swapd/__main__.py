"""`python -m swapd`: the same command line as `swapd`."""

from swapd.cli import main

if __name__ == "__main__":
    main()
