"""The parts that decoders are built from."""
