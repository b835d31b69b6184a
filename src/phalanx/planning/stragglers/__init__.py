"""A step whose ranks or links are not equally fast."""
