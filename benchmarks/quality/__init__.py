"""Quality of students by losses, codecs, tiers of logits and sizes."""
