"""What people see. No torch."""
