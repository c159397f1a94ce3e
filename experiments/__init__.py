"""Programs: they may import anything and are imported by nobody."""
