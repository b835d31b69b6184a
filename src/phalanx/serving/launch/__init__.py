"""Launch files of serving engines, from a ServingPlan: one engine a file."""
