"""Optional arrays outside the parts, which only some stores hold."""
