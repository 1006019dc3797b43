"""Scoring given continuations, labels and texts: what `LLM`, the HTTP routes and `vllm score` share."""
