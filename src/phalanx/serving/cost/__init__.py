"""The price of serving: seconds of a step of prefill, decode or both, and bytes on a GPU."""
