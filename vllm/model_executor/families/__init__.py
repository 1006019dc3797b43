"""Model families: each file reads its own configuration fields and names its own weights. No torch."""
