"""The processes of a run: launching ranks, joining them into a world, and finding out which one failed.

Read launch.py first: a launcher's agent (agent.py) starts the ranks (rank.py). Each writes what it is doing to a
status page (status.py) in the launcher's folder (folder.py). From the pages the agent (agent.py) determines
which rank keeps the others waiting.
"""
