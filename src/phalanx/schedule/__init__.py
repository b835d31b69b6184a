"""Who does what when, as plain data without torch: events of a step, collectives, pipeline schedules, partitions,
what layers send, gradient buckets. Read event.py first, then pipeline/schedules.py and collectives/ir.py."""
