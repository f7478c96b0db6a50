"""The methods that today's engines grew out of, as textbooks have them: for teaching and for ``dsframe compare``.

Each is one optimizer step of :class:`~dsframe.engines.replica.ReplicaEngine` with another way to communicate, in a few dozen
lines, and says why it lost. None is meant for real training, none is ever chosen by ``"engine": "auto"``.
"""
