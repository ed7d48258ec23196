"""Translation with no parallel text."""
