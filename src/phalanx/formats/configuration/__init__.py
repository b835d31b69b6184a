"""Configurations of other frameworks: what all their readers share."""
