"""Runs of our own trainer: trained, swept, proved, and what is made of them."""
