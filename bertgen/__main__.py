"""``python -m bertgen``."""

from bertgen.cli import main

main()
