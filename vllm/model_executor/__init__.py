"""Models and what loads them: token ids to hidden states to logits."""
