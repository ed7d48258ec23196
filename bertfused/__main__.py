"""``python -m bertfused``."""

from bertfused.cli import main

main()
