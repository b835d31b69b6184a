"""The search for a deployment: legal layouts, their steady state, the queue of finalists, and rejected neighbours."""
