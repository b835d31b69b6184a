"""Shared by tests: drawn strategies, a pool of long-lived ranks, commands run in this process or in a forked one."""
