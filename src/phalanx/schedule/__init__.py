"""Who does what when: plain data. No torch."""
