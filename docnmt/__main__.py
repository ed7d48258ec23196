"""``python -m docnmt``."""

from docnmt.cli import main

main()
