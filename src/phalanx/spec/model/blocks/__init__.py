"""A model as blocks of sublayers, a sublayer as a straight line of operators: what every cost, split and picture of a
model is derived from. A mechanism is one file: its sizes, and the function that returns its Sublayer."""
