"""The price of serving: what a step of prefill, decode or both takes, and what a GPU holds."""
