"""The served decoders."""
