"""What only some stores hold outside their parts."""
