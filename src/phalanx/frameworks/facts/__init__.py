"""What training frameworks can do, as data: a file per framework, a row per release, each entry with its source."""
