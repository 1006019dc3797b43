"""A name that clients import: lm-eval makes its request ids with `random_uuid`."""

import uuid


def random_uuid() -> str:
    """Return 32 random hex digits."""
    return uuid.uuid4().hex
