"""The command `feature-store`: inspects, verifies, repairs, copies, imports and exports stores."""
