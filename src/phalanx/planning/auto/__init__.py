"""Resolution of `auto` in a job: bucket size, blocks per chunk, and transport and algorithm of collectives."""
