"""What each training framework can do, as data: a file per framework, a row per release, and the source of each entry."""
