"""What `auto` in a job resolves to: bucket size, blocks per chunk, and transport and algorithm of collectives."""
