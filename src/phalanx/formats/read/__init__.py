"""Configurations of training frameworks, read: one reader a framework, one result for all."""
