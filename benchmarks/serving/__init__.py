"""How fast the engine and its server are; see __main__.py."""
