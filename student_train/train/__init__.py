"""Training a student on stores: steps over stages, losses of a store, validation."""
