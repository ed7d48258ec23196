"""``python -m backtranslation``."""

from backtranslation.cli import main

main()
