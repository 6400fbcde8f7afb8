"""The command `feature-store`: looks at stores, checks, mends, copies and imports them."""
