"""How to serve a model: legal layouts, their steady state, the queue of the finalists, and why not the neighbours."""
