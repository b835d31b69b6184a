"""Communication between the ranks of a mesh: three transports behind one Comm, and what they record.

Read communicator.py first: every collective of a step goes through its Comm, which records it (recorder.py, and
timeline.py for times) and hands it as a Call (transport.py) to a transport: native.py, p2p.py or shm.py.
"""
