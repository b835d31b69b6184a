"""What a user describes: frozen data, checked on creation. No torch."""
