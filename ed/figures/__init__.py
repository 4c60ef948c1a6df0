"""Pictures for people, drawn from what `ed.core` computes."""
