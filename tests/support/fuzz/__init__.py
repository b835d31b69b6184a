"""Inputs drawn from a grammar: files and command lines that are valid, and the same with mistakes in them."""
