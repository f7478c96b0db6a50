"""Horovod: ring all-reduce of full replicas."""
