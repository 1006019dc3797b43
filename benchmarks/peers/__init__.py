"""What compare_peers.py runs: engines in processes of their own."""
