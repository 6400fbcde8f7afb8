"""What the commands of `feature-store` do: verify, repair, copy, merge, info, show."""
