"""Other people's formats; nothing else in the package knows them."""
