"""A name that trainers import: it finds the address that their other processes connect to."""

import socket


def get_ip() -> str:
    """Return the address that this machine is reached at from outside; 127.0.0.1 where it has none."""
    probes = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # addresses kept for documentation
    for family, address in probes:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # chooses a route, sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
