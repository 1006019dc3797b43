"""Scoring of given texts, continuations and labels."""
