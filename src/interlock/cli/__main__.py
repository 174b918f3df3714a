"""`python -m interlock.cli` is the console script."""

from interlock.cli import main

main()
