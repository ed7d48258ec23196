"""``python -m unsup``."""

from unsup.cli import main

main()
