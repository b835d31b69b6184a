"""Launch files of serving engines from a ServingPlan: one module per engine."""
