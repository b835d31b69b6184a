"""What `auto` in a job resolves to: bucket size, blocks per chunk, and the transport and algorithm of each
collective."""
